"""/v1/contexts: documents whose KV is prepared in the background and kept until a deadline.

The convention is that of Moonshot's context caching (`POST /v1/caching`: messages, `ttl` in seconds, a status); here a
follow-up names nothing: it begins with the same messages or text.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import HeadwayError, RequestError
from headway.core.sampling import SamplingParams
from headway.runtime.engine.protocol import OutputDelta, SubmitRequest
from headway.serving.access_control import RequestOwner
from headway.serving.context import ServerContext, context
from headway.serving.errors import ApiError, json_response
from headway.serving.generation_job import RequestContext, fit_length, read_model, salt_of
from headway.serving.json_object import JsonObject
from headway.serving.prompts import PromptReader, TokenPrompt
from headway.serving.request_bodies import MAX_SALT, Messages, Raw, RequestBody, body_schema, read_body

router = APIRouter()

_BACKGROUND = 2**63 - 1
"""The last of all priorities."""
_LONGEST_S = 30 * 86_400.0
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


class ContextBody(RequestBody):
    """/v1/contexts."""

    undecoded: ClassVar[frozenset[str]] = frozenset(("prompt",))

    model: str = Field(description="a name that the model is served by (GET /v1/models)")
    messages: Messages | None = Field(None, description="messages with which chats will begin")
    prompt: Raw | None = Field(None, description="or text, or an array of token ids, with which prompts will begin")
    ttl: float = Field(3600.0, gt=0, le=_LONGEST_S, description="seconds for which the KV is kept")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=MAX_SALT, description="as in the requests that are to find it"
    )


@dataclass(slots=True)
class PreparedContext:
    """One context: being computed, kept, or let go."""

    id: str
    model: str
    tokens: int
    created: int
    """Unix time."""
    ttl_s: float
    status: Literal["pending", "ready", "released"] = "pending"
    error: str | None = None
    """Why it was let go before its time."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def shown(self) -> dict[str, Any]:
        """Return the object of the API."""
        return {
            "id": self.id, "object": "context", "model": self.model, "status": self.status, "tokens": self.tokens,
            "created_at": self.created, "expires_at": int(self.created + self.ttl_s), "error": self.error,
        }  # fmt: skip

    async def run(self, deltas: AsyncGenerator[OutputDelta, None]) -> None:
        """Hold the engine's request, and with it the KV, until the deadline. Closing `deltas` lets go of it."""
        try:
            async with asyncio.timeout(self.ttl_s), aclosing(deltas):
                async for delta in deltas:
                    self.status = "ready"
                    self.error = delta.error
        except TimeoutError:
            self.error = "its ttl has passed"
        except HeadwayError as error:
            self.error = str(error)
        finally:
            self.status = "released"


@dataclass(frozen=True, slots=True)
class _ContextJob:
    body: ContextBody
    prompt: TokenPrompt
    salt: str
    received_s: float


def _parse(fields: JsonObject, asked: RequestContext, prompts: PromptReader) -> _ContextJob:
    read_model(fields, asked.models)
    body = read_body(ContextBody, fields)
    if (body.messages is None) == (body.prompt is None):
        raise RequestError("give either 'messages' or 'prompt'", "messages")
    if not asked.info.prefix_cache:
        raise RequestError("this server keeps no prefixes: start it with --prefix-cache, on one process")
    if body.messages is not None:
        prompt = prompts.chat(body.messages, add_generation_prompt=False, variables=None)
    else:
        assert body.prompt is not None
        found = prompts.read(body.prompt, add_special_tokens=True)
        if len(found) != 1:
            raise RequestError(f"'prompt' must be one prompt, not {len(found)}", "prompt")
        prompt = found[0]
    fit_length((prompt,), _PARAMS, asked.info, "ttl")
    return _ContextJob(body, prompt, salt_of(asked.owner, body.cache_salt), asked.received_s)


@router.post(
    "/v1/contexts", response_model=None, openapi_extra=body_schema(ContextBody), summary="Prepare a document's KV"
)
async def create(request: Request) -> Response:
    """Computed after all other work, then kept until `ttl` seconds have passed, DELETE, or a request that needs its
    memory. Prompts that begin with it compute the rest only."""
    server = context(request)
    job = await server.parse(request, _parse)
    kept = PreparedContext(f"ctx-{uuid.uuid4().hex}", job.body.model, job.prompt.tokens, int(time.time()), job.body.ttl)
    submit = SubmitRequest(
        id=kept.id, prompt_tokens=job.prompt.tokens, params=_PARAMS, received_s=job.received_s, priority=_BACKGROUND,
        cache_salt=job.salt, pin=True,
    )  # fmt: skip
    deltas = cast("AsyncGenerator[OutputDelta, None]", server.engine.generate(submit, job.prompt.data))
    owner: RequestOwner = request.scope["headway.owner"]
    _forget_old(server)
    server.contexts[owner.id, kept.id] = kept
    kept.task = server.active.begin(kept.run(deltas))
    return json_response(kept.shown(), 201)


@router.get("/v1/contexts", response_model=None, summary="The prepared documents of this key")
async def index(request: Request) -> Response:
    """Newest last."""
    owner: RequestOwner = request.scope["headway.owner"]
    mine = [kept.shown() for (key, _), kept in context(request).contexts.items() if owner.may_use(key)]
    return json_response({"object": "list", "data": mine})


@router.get("/v1/contexts/{name}", response_model=None, summary="One prepared document")
async def show(request: Request) -> Response:
    """`status`: pending while it is computed, ready, or released, with `error` saying why."""
    return json_response(_find(request)[1].shown())


@router.delete("/v1/contexts/{name}", response_model=None, summary="Let a prepared document go")
async def delete(request: Request) -> Response:
    """Its KV gives way when memory is needed."""
    key, kept = _find(request)
    del context(request).contexts[key]
    if kept.task is not None:
        kept.task.cancel()
    return json_response({"id": kept.id, "object": "context.deleted", "deleted": True})


def _find(request: Request) -> tuple[tuple[str, str], PreparedContext]:
    name, owner = request.path_params["name"], request.scope["headway.owner"]
    for key, kept in context(request).contexts.items():
        if key[1] == name and owner.may_use(key[0]):
            return key, kept
    raise ApiError(404, f"no context {name[:200]!r} is known: POST /v1/contexts makes one")


def _forget_old(server: ServerContext) -> None:
    """Drop released contexts an hour after their time."""
    now = time.time()
    for key, kept in list(server.contexts.items()):
        if kept.status == "released" and now > kept.created + kept.ttl_s + 3600.0:
            del server.contexts[key]
