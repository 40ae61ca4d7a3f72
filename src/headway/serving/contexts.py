"""/v1/contexts: documents whose KV is prepared in the background and kept until a deadline.

The convention is that of Moonshot's context caching (`POST /v1/caching`: messages, `ttl` in seconds, a status). A
follow-up begins with the same messages or text, or names the document (`context_id`, as in Volcengine Ark's
`/context/chat/completions`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import HeadwayError, OverloadedError, RequestError
from headway.core.request import BACKGROUND_PRIORITY, SamplingParams
from headway.runtime.engine.protocol import EngineInfo, OutputDelta, SubmitRequest
from headway.serving.access import RequestOwner
from headway.serving.context import ServerContext, context
from headway.serving.errors import json_response
from headway.serving.jobs import (
    ContextRecord,
    PromptReader,
    RequestContext,
    TokenPrompt,
    fit_length,
    read_model,
    salt_of,
)
from headway.serving.request_bodies import MAX_SALT, Messages, Prompt, RequestBody, body_schema, read_body

log = logging.getLogger("headway.server")
router = APIRouter()

_LONGEST_S = 30 * 86_400.0
_MOST_PENDING = 256
"""Most documents that are accepted and not yet computed."""
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


class ContextBody(RequestBody):
    """/v1/contexts."""

    model: str = Field(description="a name that the model is served by (GET /v1/models)")
    messages: Messages | None = Field(None, description="messages with which chats will begin")
    prompt: Prompt | None = Field(None, description="or text, or an array of token ids, with which prompts will begin")
    ttl: float = Field(3600.0, gt=0, le=_LONGEST_S, description="seconds for which the KV is kept")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=MAX_SALT, description="as in the requests that are to find it"
    )


@dataclass(slots=True)
class PreparedContext:
    """One context: being computed, kept, or let go."""

    record: ContextRecord
    status: Literal["pending", "ready", "released"] = "pending"
    computed: int = 0
    """Tokens that have been computed."""
    error: str | None = None
    """Why it was let go before its time."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    async def _hold(self, deltas: AsyncGenerator[OutputDelta, None], turn: asyncio.Semaphore) -> None:
        async with AsyncExitStack() as held, aclosing(deltas):
            await held.enter_async_context(turn)
            async for delta in deltas:
                self.computed = max(self.computed, delta.prefilled_tokens)
                self.status = "ready" if self.computed >= self.record.tokens else "pending"
                self.error = delta.error
                if self.status == "ready":
                    await held.aclose()

    def shown(self) -> dict[str, Any]:
        """Return the object of the API."""
        record = self.record
        return {
            "id": record.id, "object": "context", "model": record.model, "status": self.status,
            "tokens": record.tokens, "computed_tokens": self.computed, "created_at": int(record.created),
            "expires_at": int(record.created + record.ttl_s), "error": self.error,
        }  # fmt: skip

    async def run(self, begin: Callable[[], AsyncGenerator[OutputDelta, None]], turn: asyncio.Semaphore) -> None:
        """Hold the engine's request, and with it the KV, until the deadline. begin: submits it; turn: held until it is
        computed. A document that a full queue refuses waits on."""
        try:
            async with asyncio.timeout(self.record.left_s):
                while True:
                    try:
                        await self._hold(begin(), turn)
                        return
                    except OverloadedError as error:
                        await asyncio.sleep(error.retry_after_s)
        except TimeoutError:
            self.error = "its ttl has passed"
        except HeadwayError as error:
            self.error = str(error)
        finally:
            self.status = "released"


def _parse(
    fields: Mapping[str, Any], request: RequestContext, prompts: PromptReader
) -> tuple[ContextRecord, TokenPrompt]:
    read_model(fields, request.models)
    body = read_body(ContextBody, fields)
    if (body.messages is None) == (body.prompt is None):
        raise RequestError("give either 'messages' or 'prompt'", "messages")
    if not request.info.prefix_cache:
        raise RequestError("this server keeps no prefixes: start it with --prefix-cache")
    if not request.info.prepares:
        raise RequestError(
            "a cluster, or a server with --event-log, prepares no documents: send the document as the beginning of a "
            "prompt"
        )
    record = ContextRecord(
        id=f"ctx-{uuid.uuid4().hex}", owner=request.owner, model=body.model, tokens=0, created=time.time(),
        ttl_s=body.ttl, cache_salt=body.cache_salt, prompt=msgspec.Raw(msgspec.json.encode(body.prompt)),
        messages=None if body.messages is None else tuple(body.messages),
    )  # fmt: skip
    return _tokenized(record, request.info, prompts)


def _tokenized(record: ContextRecord, info: EngineInfo, prompts: PromptReader) -> tuple[ContextRecord, TokenPrompt]:
    """Return a record with its number of tokens, and these. Raises RequestError where they are not one prompt."""
    if record.messages is not None:
        prompt = prompts.chat(record.messages, add_generation_prompt=False, variables=None)
    else:
        found = prompts.read(msgspec.json.decode(record.prompt), add_special_tokens=True)
        if len(found) != 1:
            raise RequestError(f"'prompt' must be one prompt, not {len(found)}", "prompt")
        prompt = found[0]
    fit_length((prompt,), _PARAMS, info, "ttl")
    return msgspec.structs.replace(record, tokens=prompt.tokens), prompt


def _hold(server: ServerContext, record: ContextRecord, prompt: TokenPrompt) -> PreparedContext:
    """Have a document computed and kept."""
    kept = PreparedContext(record)
    submit = SubmitRequest(
        id=record.id, prompt_tokens=record.tokens, params=_PARAMS, received_s=time.monotonic(),
        priority=BACKGROUND_PRIORITY, cache_salt=salt_of(record.owner, record.cache_salt), pin=True,
    )  # fmt: skip

    def begin() -> AsyncGenerator[OutputDelta, None]:
        return cast("AsyncGenerator[OutputDelta, None]", server.engine.generate(submit, prompt.data))

    server.contexts[record.owner, record.id] = kept
    kept.task = server.active.begin(kept.run(begin, server.preparing))
    return kept


@router.post(
    "/v1/contexts", response_model=None, openapi_extra=body_schema(ContextBody), summary="Prepare a document's KV"
)
async def create(request: Request) -> Response:
    """Computed after all other work, then kept until `ttl` seconds have passed, DELETE, or a request that needs its
    memory. Prompts that begin with it compute the rest only."""
    server = context(request)
    _check_queue(server, request.scope["headway.owner"].id)
    record, prompt = await server.parse(request, _parse)
    _check_queue(server, record.owner)
    _forget_old(server)
    return json_response(_hold(server, record, prompt).shown(), 201)


@router.get("/v1/contexts", response_model=None, summary="The prepared documents of this key")
async def index(request: Request) -> Response:
    """Newest last."""
    owner: RequestOwner = request.scope["headway.owner"]
    mine = [kept.shown() for (key, _), kept in context(request).contexts.items() if owner.may_use(key)]
    return json_response({"object": "list", "data": mine})


@router.get("/v1/contexts/{name}", response_model=None, summary="One prepared document")
async def show(request: Request) -> Response:
    """`status`: pending while it is computed, ready, or released, with `error` saying why."""
    return json_response(_find(request).shown())


@router.delete("/v1/contexts/{name}", response_model=None, summary="Let a prepared document go")
async def delete(request: Request) -> Response:
    """Its KV gives way when memory is needed."""
    server, kept = context(request), _find(request)
    record = kept.record
    del server.contexts[record.owner, record.id]
    if kept.task is not None:
        kept.task.cancel()
    return json_response({"id": record.id, "object": "context.deleted", "deleted": True})


def _find(request: Request) -> PreparedContext:
    return context(request).find_context(request.scope["headway.owner"], request.path_params["name"])


def _check_queue(server: ServerContext, owner: str) -> None:
    """Raise OverloadedError where too many documents are still to be computed."""
    pending = [key for (key, _), kept in server.contexts.items() if kept.status == "pending"]
    most = _MOST_PENDING // 2 if len(server.settings.api_keys) > 1 else _MOST_PENDING
    # One of several keys leaves half of the queue to the others.
    if len(pending) >= _MOST_PENDING or pending.count(owner) >= most:
        raise OverloadedError(f"{len(pending)} documents are still to be prepared; try again", 10.0)


def _forget_old(server: ServerContext) -> None:
    """Drop released contexts an hour after their time."""
    for key, kept in list(server.contexts.items()):
        if kept.status == "released" and kept.record.left_s < -3600.0:
            del server.contexts[key]
