"""Answering a generation request, streamed or whole: the part that both endpoints share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from headway.serving.access_control import RequestOwner
from headway.serving.active_tasks import ActiveTasks, server_ending_error
from headway.serving.answer_pieces import TextPiece
from headway.serving.body import Parse
from headway.serving.context import ServerContext, context
from headway.serving.errors import ApiError, as_api_error, json_response
from headway.serving.generation import LONG_TOKENS, generate
from headway.serving.generation_job import GenerationJob
from headway.serving.generation_record import GenerationRecord
from headway.serving.identity import engine_id
from headway.serving.journaled_request import JournaledRequest, Kind
from headway.serving.logprobs import ScoredToken
from headway.serving.merge import cancel_all, merged
from headway.serving.sse import DONE, SseResponse, client_gone, event

T = TypeVar("T")


@dataclass(slots=True)
class ChoiceAnswer:
    """One choice of an answer, collected from its pieces."""

    text: list[str] = field(default_factory=list)
    """Pieces of the text, in order."""
    tokens: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    prompt_scored: tuple[ScoredToken, ...] | None = None
    """The prompt's tokens, where their log-probabilities were asked for."""
    finish: str = "stop"
    stop_reason: str | int | None = None

    def add(self, piece: TextPiece) -> None:
        """Append the next piece."""
        self.text.append(piece.text)
        self.tokens.extend(piece.tokens)
        self.scored.extend(piece.scored)
        if piece.prompt_scored is not None:
            self.prompt_scored = piece.prompt_scored
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason


class AnswerFormat(Protocol):
    """JSON format of one endpoint's answers. One object per request, because formats keep state of their stream."""

    job: GenerationJob
    kind: Kind

    def chunks(self, index: int, piece: TextPiece) -> Sequence[dict[str, Any]]:
        """Return the stream's objects for one piece of choice `index`."""

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the last object of a stream that reports usage."""

    def whole(self, answers: Sequence[ChoiceAnswer], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the non-streamed answer."""


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    """Fields that every object of an answer repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def of(cls, prefix: str, request_id: str, model: str) -> AnswerHeader:
        """Make a header with the present as `created`."""
        return cls(f"{prefix}-{request_id}", int(time.time()), model)

    def object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Wrap `choices` in an object of the API."""
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more
        }  # fmt: skip


MakeFormat = Callable[[GenerationJob, ServerContext, str], AnswerFormat]


async def answer(request: Request, parse: Parse[GenerationJob], make_format: MakeFormat) -> Response:
    """Admit, parse and run a request, and return its response.

    Raises HeadwayError of any kind; the application's exception handlers make the error object from it.
    """
    server = context(request)
    request_id: str = request.scope["headway.id"]
    owner: RequestOwner = request.scope["headway.owner"]
    # Holds the admission slot and the journal entry; released here on an error, else after the last byte.
    with ExitStack() as held:
        try:
            # Before the body is read; a slot is taken once it is there, so that half a body holds none.
            server.check_room(owner.id)
            job = await server.parse(request, parse)
            held.enter_context(server.admitted(owner.id))
        except Exception as error:
            server.metrics.rejected(as_api_error(error).status)
            raise
        records = [server.metrics.record(job, prompt.tokens) for prompt in job.prompts]
        request.scope["headway.log"]["records"] = records
        if server.tracer is not None:
            server.tracer.follow(request.headers, request_id, job, records)
        form = make_format(job, server, request_id)
        journaled = await _journaled(server, request, form, job)
        if journaled is not None:
            # Pushed after admission, so it runs first: the journal entry ends before the slot is free.
            held.callback(_end, server, journaled, records)
        pieces = run_job(server, job, request_id, records, journaled)
        if job.stream:
            # The response outlives this function: the slot is released when the stream has ended.
            release = held.pop_all()
            return SseResponse(_events(form, pieces, records), server.settings, server.active, release.close)
        answers = await _unless_client_leaves(request, _collect(pieces, len(job.prompts)), server.active)
        response = await _encoded(job, lambda: json_response(form.whole(answers, usage(job, records))))
        response.background = BackgroundTask(_close, held.pop_all())  # once it is sent
        return response


async def _journaled(
    server: ServerContext, request: Request, form: AnswerFormat, job: GenerationJob
) -> JournaledRequest | None:
    """Record the accepted request; None without a journal."""
    if server.journal is None:
        return None
    owner: RequestOwner = request.scope["headway.owner"]
    label, key = request.scope["headway.id"], request.scope["headway.key"]
    return await JournaledRequest.of(server.journal, label, key, owner.id, form.kind, job)


async def _close(held: ExitStack) -> None:
    """Close the stack on the event loop; starlette would run a plain function in a worker thread."""
    held.close()


def _end(server: ServerContext, journaled: JournaledRequest, records: Sequence[GenerationRecord]) -> None:
    """End the request in the journal, unless it is left to the next server."""
    if not is_unfinished(server, records):
        journaled.end()


def is_unfinished(server: ServerContext, records: Sequence[GenerationRecord]) -> bool:
    """Return whether the engine was lost for good before every prompt had its answer.

    Such a request is left to the next server. A drained engine has finished every prompt, even where the last bytes are
    still to be sent.
    """
    return server.engine.state == "lost" and any(record.reason not in ("stop", "length") for record in records)


def usage(job: GenerationJob, records: Sequence[GenerationRecord]) -> dict[str, Any]:
    """Return the API's token counts over all choices; cached tokens as of each prompt's first choice."""
    output = sum(record.output_tokens for record in records)
    prompt, cached = job.prompt_tokens, sum(record.cached_tokens for record in records[:: job.choices])
    return {
        "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def run_job(
    server: ServerContext,
    job: GenerationJob,
    request_id: str,
    records: Sequence[GenerationRecord],
    journaled: JournaledRequest | None,
) -> AsyncGenerator[tuple[int, TextPiece], None]:
    """Yield the pieces of all prompts in order of arrival, each with its prompt's index."""
    names = [engine_id(request_id) for _ in records]
    if server.live is not None:
        for name, record in zip(names, records, strict=True):
            server.live.follow(name, record)
    return merged(
        [
            generate(server.engine, server.tokenizer, job, prompt, name, record, journaled, index)
            for index, (prompt, name, record) in enumerate(zip(job.prompts, names, records, strict=True))
        ]
    )


async def _events(
    form: AnswerFormat, pieces: AsyncGenerator[tuple[int, TextPiece], None], records: Sequence[GenerationRecord]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for index, piece in pieces:
            yield await _encoded(form.job, partial(_piece_events, form, index, piece, records))
    if form.job.include_usage:
        yield event(form.usage_chunk(usage(form.job, records)))
    yield DONE


def _piece_events(form: AnswerFormat, index: int, piece: TextPiece, records: Sequence[GenerationRecord]) -> bytes:
    chunks = form.chunks(index, piece)
    if form.job.continuous_usage:
        counts = usage(form.job, records)
        chunks = [{**chunk, "usage": counts} for chunk in chunks]
    return b"".join(event(chunk) for chunk in chunks)


async def _encoded(job: GenerationJob, encode: Callable[[], T]) -> T:
    """Encode a part of an answer: in another thread where it has the log-probabilities of a long prompt."""
    long = job.params.prompt_logprobs is not None and job.prompt_tokens > LONG_TOKENS
    return await asyncio.to_thread(encode) if long else encode()


async def _collect(pieces: AsyncGenerator[tuple[int, TextPiece], None], count: int) -> list[ChoiceAnswer]:
    answers = [ChoiceAnswer() for _ in range(count)]
    async with aclosing(pieces):
        async for index, piece in pieces:
            answers[index].add(piece)
    return answers


async def _unless_client_leaves(
    request: Request, work: Coroutine[Any, Any, list[ChoiceAnswer]], active: ActiveTasks
) -> list[ChoiceAnswer]:
    """Await `work`; when the client disconnects first, cancel it, which aborts the request in the engine.

    Raises ApiError 499 for a client that left, UnavailableError when the server's shutdown cancelled `work`.
    """
    task = active.begin(work)
    watcher = asyncio.create_task(client_gone(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        # Only `ActiveTasks.cancel` cancels this task before the wait returns.
        if task.cancelled():
            raise server_ending_error()
        if task.done():
            return task.result()
        request.scope["headway.log"]["client"] = "gone"
        raise ApiError(499, "the client left")
    finally:
        await cancel_all([task, watcher])
