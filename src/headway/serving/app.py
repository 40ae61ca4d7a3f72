"""The application: endpoints, error handlers and lifespan, around one engine, one tokenizer and one set of settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from headway.core.errors import HeadwayError
from headway.runtime.engine.protocol import EngineClient
from headway.serving import contexts, instances, operations, recovered_requests, tokens
from headway.serving.access_control import AccessControl
from headway.serving.answer import answer
from headway.serving.auth_middleware import AuthMiddleware
from headway.serving.body import BodyReader
from headway.serving.chat import ChatFormat, parse_chat
from headway.serving.completions import CompletionFormat, parse_completion
from headway.serving.context import ServerContext
from headway.serving.errors import ApiError, as_api_error, error_response
from headway.serving.home_page import HOME_HEADERS, home_page
from headway.serving.journal import RequestJournal
from headway.serving.live import pages
from headway.serving.live.server_feed import ServerFeed
from headway.serving.metrics import ServerMetrics
from headway.serving.request_bodies import ChatBody, CompletionBody, body_schema
from headway.serving.request_tracing import open_tracer
from headway.serving.response_format import ResponseBody, ResponseFormat, parse_response
from headway.serving.settings import ServerSettings
from headway.serving.status_line import StatusLine
from headway.serving.tokenizer import ModelTokenizer

router = APIRouter()


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
        server.tracer = open_tracer(settings.otlp_traces_endpoint, operations.package_version())
    if settings.journal is not None:
        server.unbound_journal = RequestJournal(Path(settings.journal))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        status: asyncio.Task[None] | None = None
        try:
            if settings.start_engine:
                await server.start_engine()
                if server.journal is not None:
                    # After the start: the journal has been checked against the model, and the engine takes requests.
                    recovered_requests.resume_all(server)
            if settings.status_every_s:
                status = asyncio.create_task(StatusLine(engine, server.metrics).run(settings.status_every_s))
            yield
        finally:
            if status is not None:
                status.cancel()
            # Closed first: requests that the shutdown cancels must not end in the journal.
            server.close_journal()
            recovered_requests.stop_all(server)
            server.bodies.close()
            if server.tracer is not None:
                server.tracer.close()
            await engine.close()

    app = FastAPI(
        title="Headway", version=operations.package_version(), lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.headway = server
    _add_middleware(app, settings)
    app.add_exception_handler(HeadwayError, _on_headway_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    for module in (operations, tokens, contexts, recovered_requests, instances):
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
