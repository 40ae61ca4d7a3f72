"""The application: endpoints, start page, error handlers and lifespan, around one engine, one tokenizer and one set of
settings.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from headway.core.errors import HeadwayError, OverloadedError, RequestError, UnavailableError
from headway.policy.placement.contract import RateTable
from headway.runtime.cluster.instances import InstanceAdmin
from headway.runtime.engine.protocol import EngineClient, EngineInfo
from headway.serving import contexts, recovery
from headway.serving.access import AccessControl, AuthMiddleware
from headway.serving.answer import answer
from headway.serving.context import ServerContext, context
from headway.serving.errors import ApiError, as_api_error, error_response, json_response
from headway.serving.formats import (
    ChatFormat,
    CompletionFormat,
    ResponseBody,
    ResponseFormat,
    parse_chat,
    parse_completion,
    parse_response,
    render_prompt,
)
from headway.serving.jobs import BodyReader, PromptReader, RequestContext, read_model
from headway.serving.journal import JournalWriter, RequestJournal
from headway.serving.live import pages
from headway.serving.live.feed import ServerFeed
from headway.serving.metrics import ServerMetrics, StatusLine
from headway.serving.request_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    body_schema,
    read_body,
)
from headway.serving.run import example, example_call
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer
from headway.serving.tracing import open_tracer

T = TypeVar("T")

router = APIRouter()
# The API wants a creation time of the model; its files' times are not known here.
_STARTED = int(time.time())


@router.get("/v1/models", response_model=None, summary="The model, under each name it is served by")
async def models(request: Request) -> Response:
    """`max_model_len` tells clients how long prompt and answer may be together."""
    server = context(request)
    info = server.info()
    return json_response({"object": "list", "data": [_model(name, info) for name in server.models()]})


@router.get("/v1/models/{name:path}", response_model=None, summary="The model under one of its names")
async def model(request: Request) -> Response:
    """404 for a name that it does not have. Names may hold slashes."""
    server = context(request)
    name: str = request.path_params["name"]
    if name not in server.models():
        raise ApiError(404, f"the model {name[:200]!r} does not exist here; this server has {server.models()[0]!r}")
    return json_response(_model(name, server.info()))


def _model(name: str, info: EngineInfo) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": _STARTED, "owned_by": "headway", "root": info.model,
        "parent": None, "max_model_len": info.max_model_len,
    }  # fmt: skip


@router.get("/health", response_model=None, summary="Live: 503 only when the engine is lost for good")
async def health(request: Request) -> Response:
    """For a liveness probe: while starting, recovering or draining the process is well. `recoveries` counts losses of
    workers, `engine_restarts` those of the engine's own process, since the server started."""
    engine = context(request).engine
    stats = engine.stats
    content = {
        "status": engine.state,
        "recoveries": stats.recoveries_total,
        "engine_restarts": stats.engine_restarts_total,
    }
    # Draining and recovering are not failures: a restart by the probe would lose accepted requests.
    return json_response(content, 503 if engine.state == "lost" else 200)


@router.get("/ready", response_model=None, summary="Ready: 200 when new requests are taken, 503 otherwise")
async def ready(request: Request) -> Response:
    """For a readiness probe or a load balancer. While workers or the engine start again it says so: requests that come
    all the same wait until they have. While a full disk or a full queue refuses new requests it says which."""
    try:
        server = context(request)
        server.info()
        if server.engine.state == "recovering":
            raise UnavailableError("workers are lost and start again; what was accepted goes on afterwards", 1.0)
        server.check_room(None)
    except (OverloadedError, UnavailableError) as error:
        # A probe needs to know that it is no time for requests, not why.
        refusal = as_api_error(error)
        return error_response(ApiError(503, str(error), headers=refusal.headers))
    content = {"status": "ready"}
    if problem := server.engine.stats.log_problem:
        content["event_log"] = problem  # which refuses no request
    return json_response(content)


@router.get("/version", response_model=None, summary="The server's version")
async def show_version(request: Request) -> Response:
    """The installed package's."""
    return json_response({"version": package_version()})


@router.get("/metrics", response_model=None, summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    """Text format 0.0.4."""
    return Response(context(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def package_version() -> str:
    """Return the installed version, or 'unknown' when run from a bare source tree."""
    try:
        return version("headway")
    except PackageNotFoundError:
        return "unknown"


@router.post("/tokenize", response_model=None, openapi_extra=body_schema(TokenizeBody), summary="Text to token ids")
async def tokenize(request: Request) -> Response:
    """`prompt` (text, with the special tokens that completions add) or `messages` (through the chat template)."""
    return await context(request).parse(request, _tokenize)


@router.post("/detokenize", response_model=None, openapi_extra=body_schema(DetokenizeBody), summary="Token ids to text")
async def detokenize(request: Request) -> Response:
    """`tokens` as text, special tokens included; at most as many as the model's context holds."""
    return await context(request).parse(request, _detokenize)


# Both build the response too: a million ids as JSON would keep the event loop for some 20 ms.
def _tokenize(fields: Mapping[str, Any], request: RequestContext, prompts: PromptReader) -> Response:
    _check_model(fields, request)
    body = read_body(TokenizeBody, fields)
    # Messages win when both are given.
    if body.messages is not None:
        prompt = render_prompt(body, body.messages, prompts)
    elif body.prompt is not None:
        prompt = prompts.text(body.prompt, add_special_tokens=body.add_special_tokens)
    else:
        raise RequestError("'prompt' (text) or 'messages' is required", "prompt")
    tokens = array("i", prompt.data.tobytes()).tolist()
    answer: dict[str, Any] = {"count": prompt.tokens, "max_model_len": request.info.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [_shown(prompts.tokenizer, token) for token in tokens]
    return json_response(answer)


def _detokenize(fields: Mapping[str, Any], request: RequestContext, prompts: PromptReader) -> Response:
    _check_model(fields, request)
    ids = prompts.token_ids(read_body(DetokenizeBody, fields).tokens, "tokens")
    if not prompts.tokenizer.has_text:
        raise RequestError("this model has no tokenizer", "tokens")
    return json_response({"prompt": prompts.tokenizer.decode(ids)})


def _check_model(fields: Mapping[str, Any], request: RequestContext) -> None:
    """Validate the model's name where it is given; it is optional here. Raises RequestError or ApiError."""
    if "model" in fields:
        read_model(fields, request.models)


def _shown(tokenizer: ModelTokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


_LARGEST_BODY = 4096
_LARGEST_TABLE = 1 << 16


class _JoinBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pool: int = 0


@router.get("/v1/cluster", response_model=None, summary="The instances of the cluster, their state and load")
async def show(request: Request) -> Response:
    """404 where one engine serves alone."""
    return json_response(_cluster(request).report())


@router.get("/v1/cluster/instances/{number}", response_model=None, summary="One instance")
async def show_one(request: Request) -> Response:
    """Its state and load."""
    number = _number(request)
    # Few instances: a scan is cheaper than an index.
    for report in _cluster(request).report().instances:
        if report.id == number:
            return json_response(report)
    raise ApiError(404, f"there is no instance {number}")


@router.post("/v1/cluster/instances", response_model=None, summary="One more instance")
async def join(request: Request) -> Response:
    """`{"pool": 0}`: one like those of the cluster file's first pool. 202: it is starting, and gets work when ready."""
    cluster, server = _cluster(request), context(request)
    pool = (await _small_body(request, _JoinBody, _LARGEST_BODY, '{"pool": 0}', "pool")).pool
    present, most = len(cluster.report().instances), server.settings.max_instances
    if present >= most:
        raise OverloadedError(f"the cluster has {present} instances, and may have {most}", 30.0)
    return json_response(cluster.join(pool), 202)


@router.delete("/v1/cluster/instances/{number}", response_model=None, summary="Drain an instance, then end it")
async def leave(request: Request) -> Response:
    """202: it takes nothing new, and leaves the list when all that is there has ended."""
    cluster, number = _cluster(request), _number(request)
    if all(report.id != number for report in cluster.report().instances):
        raise ApiError(404, f"there is no instance {number}")
    return json_response(cluster.leave(number), 202)


@router.put("/v1/cluster/rates", response_model=None, summary="Tetris's improvement rates, from now on")
async def replace_rates(request: Request) -> Response:
    """The file that `headway profile rates` writes; used from the next decision on, under tetris."""
    server = context(request)
    engine: Any = server.engine
    if not isinstance(engine, InstanceAdmin):
        raise ApiError(404, "this server places no requests by improvement rates: `headway cluster` does, under tetris")
    form = '{"points": [[requests a second, rate], ...]}'
    table = await _small_body(request, RateTable, _LARGEST_TABLE, form, "points")
    engine.replace_rates(table)
    return json_response(table)


async def _small_body(request: Request, kind: type[T], most_bytes: int, form: str, param: str) -> T:
    """Read a body of few bytes as an object of a class. form: how to write it. Raises ApiError 415 and 400."""
    sent = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # What a form of a web page can send is not JSON.
    if sent != "application/json":
        raise ApiError(415, f"content-type {sent[:40]!r} is not supported: send application/json")
    server = context(request)
    body = await server.active.begin(server.bodies.whole(request, most_bytes))
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"{error}: send {form}", param) from None


def _cluster(request: Request) -> InstanceAdmin:
    engine: Any = context(request).engine
    if not isinstance(engine, InstanceAdmin):
        raise ApiError(404, "this server has one engine and no cluster: `headway cluster` has")
    return engine


def _number(request: Request) -> int:
    text: str = request.path_params["number"]
    # One spelling per instance: no leading zeros, no other scripts' digits.
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or text != str(int(text)):
        raise ApiError(404, f"there is no instance {text[:40]!r}: instances have numbers")
    return int(text)


@router.post("/v1/completions", response_model=None, openapi_extra=body_schema(CompletionBody), summary="Continue text")
async def completions(request: Request) -> Response:
    """Text or token ids in, text (and token ids) out; streamed with `stream: true`."""
    return await answer(request, parse_completion, CompletionFormat)


@router.post("/v1/chat/completions", response_model=None, openapi_extra=body_schema(ChatBody), summary="Answer a chat")
async def chat_completions(request: Request) -> Response:
    """Messages in, the assistant's next message out; streamed with `stream: true`."""
    return await answer(request, parse_chat, ChatFormat)


@router.post("/v1/responses", response_model=None, openapi_extra=body_schema(ResponseBody), summary="Answer, as events")
async def responses(request: Request) -> Response:
    """The text part of OpenAI's Responses API, over chat: `input` in, an output message out. Nothing is stored."""
    return await answer(request, parse_response, ResponseFormat)


# GET /: one page that says what is served, asks the model something at a click, and links what else there is.

_SCRIPT = """
const button = document.querySelector("button"), output = document.querySelector("output");
button.onclick = async () => {
  button.disabled = true;
  output.textContent = "…";
  try {
    const headers = {"content-type": "application/json"};
    const reply = await fetch(button.dataset.path, {method: "POST", headers, body: button.dataset.body});
    const answer = await reply.json();
    const choice = reply.ok ? answer.choices[0] : null;
    output.textContent = choice ? (choice.message ? choice.message.content : choice.text) : answer.error.message;
  } catch (error) {
    output.textContent = String(error);
  }
  button.disabled = false;
};
"""
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

HOME_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; script-src 'sha256-{_SCRIPT_HASH}'"
    )
}
"""The browser runs this one script and loads nothing else: names of models cannot run scripts."""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 54rem; padding: 0 1rem; color: #1a1a1a; }
pre { overflow-wrap: anywhere; white-space: pre-wrap; }
h2 { border-top: 1px solid #ccc; margin-top: 2rem; padding-top: 1rem; font-size: 1.1rem; }
code, th { font-family: ui-monospace, monospace; font-size: .9em; }
table { border-collapse: collapse; } th, td { padding: .1rem 1.5rem .1rem 0; text-align: left; font-weight: 400; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd; } h2 { border-color: #444; } }
"""

_LINKS = (
    ("ui/", "what runs now, and why requests wait"),
    ("v1/models", "the names that the model is served by"),
    ("metrics", "Prometheus metrics"),
    ("health", "for a liveness probe"),
    ("ready", "for a readiness probe"),
    ("version", "of the server"),
    ("openapi.json", "every endpoint and field; docs/reference/http-api.md says how they behave"),
)


def home_page(server: ServerContext, url: str) -> str:
    """Return the page. url: the server's address as the client spelt it."""
    try:
        info = server.engine.info
        what = f"{', '.join(server.models())}: {info.dtype} on {info.device}, up to {info.max_model_len:,} tokens"
        call = f"<h2>Ask it</h2><pre><code>{escape(example(server, url))}</code></pre>{_try_button(server)}"
    except UnavailableError as error:
        what, call = str(error), ""
    links = _LINKS if server.live is not None else _LINKS[1:]
    rows = "".join(f'<tr><th><a href="{path}">/{path}</a></th><td>{escape(text)}</td></tr>' for path, text in links)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Headway</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><h1>Headway</h1>'
        f"<p>{escape(what)}. Engine: {escape(server.engine.state)}.</p>{call}<h2>Pages</h2><table>{rows}</table>"
        "</body></html>"
    )


def _try_button(server: ServerContext) -> str:
    """Return a button that sends the example and shows the answer; nothing where clients need a key."""
    if server.settings.api_key is not None:
        return ""
    path, body = example_call(server)
    data = f'data-path="{path}" data-body="{escape(json.dumps(body))}"'
    return f"<p><button {data}>Try it</button> <output></output></p><script>{_SCRIPT}</script>"


def create_app(engine: EngineClient, tokenizer: ModelTokenizer, settings: ServerSettings) -> FastAPI:
    """Make the ASGI application. Its lifespan starts the engine (if `settings.start_engine`) and closes it at the end.

    When the engine cannot start, the lifespan fails with the engine's ConfigError. `app.state.headway` holds the
    `ServerContext`, for `run.serve` and for tests.
    """
    served_as = settings.served_model_name[0] if settings.served_model_name else None
    server = ServerContext(
        engine, tokenizer, settings, BodyReader(settings, tokenizer), ServerMetrics(engine, served_as)
    )
    if settings.live_page:
        server.live = ServerFeed(engine, None if settings.event_log is None else Path(settings.event_log))
    if settings.otlp_traces_endpoint is not None:
        server.tracer = open_tracer(settings.otlp_traces_endpoint, package_version())
    if settings.journal is not None:
        server.journal = JournalWriter(RequestJournal(Path(settings.journal)), f"--journal {settings.journal}")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        status: asyncio.Task[None] | None = None
        try:
            if settings.start_engine:
                await server.start_engine()
                if server.journal is not None:
                    # After the start: the journal has been checked against the model, and the engine takes requests.
                    recovery.resume_all(server)
            if settings.status_every_s:
                status = asyncio.create_task(StatusLine(engine, server.metrics).run(settings.status_every_s))
            yield
        finally:
            if status is not None:
                status.cancel()
            # Closed first: requests that the shutdown cancels must not end in the journal.
            server.close_journal()
            recovery.stop_all(server)
            server.bodies.close()
            if server.tracer is not None:
                server.tracer.close()
            await engine.close()

    app = FastAPI(title="Headway", version=package_version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.headway = server
    _add_middleware(app, settings)
    app.add_exception_handler(HeadwayError, _on_headway_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    for module in (contexts, recovery):
        app.include_router(module.router)
    app.include_router(router)
    if server.live is not None:
        pages.add_routes(app, server.live)
    app.add_api_route("/", _show_home, include_in_schema=False, response_model=None)
    return app


def _add_middleware(app: FastAPI, settings: ServerSettings) -> None:
    app.add_middleware(AuthMiddleware, access=AccessControl(settings))
    if settings.allowed_origins:
        # Outermost: a browser asks for permission without a key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            # Origins are the limit; no cookies are used, so credentials are of no use.
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=["x-request-id", "x-headway-id"],
        )


async def _show_home(request: Request) -> Response:
    """Show what is served, and links."""
    address = str(request.base_url).rstrip("/")
    return HTMLResponse(home_page(request.app.state.headway, address), headers=HOME_HEADERS)


async def _on_headway_error(request: Request, error: Exception) -> Response:
    """Answer with the error object of any HeadwayError that an endpoint raised, and leave its message for the log."""
    shown = as_api_error(error)
    request.scope["headway.log"]["refused"] = str(shown)
    return error_response(shown)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer unknown paths and wrong methods with the same error object as all other errors."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(ApiError(error.status_code, what, headers=dict(error.headers or {})))
