"""Requests that an earlier server accepted and did not finish: computed to the end, then kept under their ids.

Their clients lost the connection with the earlier server; the answer is served at `/v1/requests/{id}`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.serving.access import RequestOwner
from headway.serving.answer import AnswerFormat, ChoiceAnswer, MakeFormat, TextPiece, is_unfinished, run_job, usage
from headway.serving.context import ServerContext, context
from headway.serving.errors import ApiError, as_api_error, error_response, json_response
from headway.serving.formats import ChatFormat, CompletionFormat, ResponseFormat
from headway.serving.journal import JournaledRequest, Kind, job_of
from headway.serving.metrics import GenerationRecord
from headway.serving.transport import DONE, SseResponse, event

log = logging.getLogger("headway.server")
router = APIRouter()

_FORMATS: dict[Kind, MakeFormat] = {"completion": CompletionFormat, "chat": ChatFormat, "response": ResponseFormat}


@dataclass(slots=True)
class RecoveredRequest:
    """A request of an earlier server, and its answer."""

    label: str
    """Its client's id, which others may have too."""
    owner: str
    form: AnswerFormat
    journaled: JournaledRequest
    records: Sequence[GenerationRecord]
    """One per prompt."""
    answers: list[ChoiceAnswer] = field(default_factory=list)
    """One per prompt, for the non-streamed answer."""
    events: list[bytes] = field(default_factory=list)
    """The answer as server-sent events, from the first; a later reader replays them."""
    error: ApiError | None = None
    """Set instead of an answer when the request failed or was deleted."""
    finished: bool = False
    """Whether the answer is complete or `error` is set."""
    task: asyncio.Task[None] | None = None
    """Runs `_see_through`."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, pieces: AsyncGenerator[tuple[int, TextPiece], None]) -> None:
        """Collect all pieces of the answer.

        An exception becomes `error`; on cancellation `error` is a 404, which readers of the stream receive.
        """
        self.answers = [ChoiceAnswer() for _ in self.form.job.prompts]
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    self.answers[index].add(piece)
                    self._add(b"".join(event(chunk) for chunk in self.form.chunks(index, piece)))
            if self.form.job.include_usage:
                self._add(event(self.form.usage_chunk(usage(self.form.job, self.records))))
            self._add(DONE)
        except asyncio.CancelledError:
            self.error = self.error or ApiError(404, "the request was deleted")
            raise
        except Exception as error:
            self.error = as_api_error(error)
            log.warning("a request that was taken up again failed: %s", self.error)
        finally:
            # Set last and in every case: `replay` relies on it to stop waiting.
            self.finished = True
            self._changed.set()

    async def replay(self) -> AsyncGenerator[bytes, None]:
        """Yield all events of the stream from the first, then new ones as they are added. Raises `error` at the end."""
        at = 0
        while True:
            while at < len(self.events):
                at += 1
                yield self.events[at - 1]
            # After all events have been yielded: an error comes after the text that precedes it.
            if self.finished:
                if self.error is not None:
                    raise self.error
                return
            # No await between the checks above and clear(): an event added meanwhile cannot be missed.
            self._changed.clear()
            await self._changed.wait()

    def whole(self) -> Response:
        """Return the answer in its endpoint's format; 202 while it is being computed."""
        if not self.finished:
            emitted = sum(record.output_tokens for record in self.records)
            content = {"object": "request", "status": "running", "output_tokens": emitted}
            return json_response(content, 202, {"Retry-After": "1"})
        if self.error is not None:
            return error_response(self.error)
        return json_response(self.form.whole(self.answers, usage(self.form.job, self.records)))

    def _add(self, events: bytes) -> None:
        self.events.append(events)
        self._changed.set()


def resume_all(server: ServerContext) -> None:
    """Resume the journal's unfinished requests. Called once, when the engine is ready."""
    assert server.journal is not None
    for number, entry in server.journal.unfinished.items():
        accepted = entry.accepted
        kind, job = job_of(entry, time.monotonic(), time.time())
        journaled = JournaledRequest(server.journal, number, entry.outputs)
        records = [server.metrics.record(job, prompt.tokens) for prompt in job.prompts]
        form = _FORMATS[kind](job, server, accepted.id)
        resumed = RecoveredRequest(accepted.id, accepted.owner, form, journaled, records)
        server.recovered[accepted.key] = resumed
        resumed.task = asyncio.create_task(_see_through(server, accepted.key, resumed))
    if server.recovered:
        log.warning("took up %d unfinished requests of the journal", len(server.recovered))


def stop_all(server: ServerContext) -> None:
    """Cancel all computing tasks when the server shuts down; unfinished requests stay in the journal."""
    for resumed in server.recovered.values():
        if resumed.task is not None:
            resumed.task.cancel()


@router.get("/v1/requests/{name}", response_model=None, summary="The answer to a request that a restart interrupted")
async def show(request: Request) -> Response:
    """The whole answer, or 202 while it is computed; with `?stream=true` its stream, from the first event on."""
    server = context(request)
    found = server.recovered[_find(request)]
    if request.query_params.get("stream", "false").lower() in ("1", "true"):
        return SseResponse(found.replay(), server.settings, server.active, lambda: None)
    return found.whole()


@router.delete("/v1/requests/{name}", response_model=None, summary="Forget a request that a restart interrupted")
async def forget(request: Request) -> Response:
    """Computing it ends, should that go on."""
    _drop(context(request), _find(request))
    return json_response({"object": "request", "status": "deleted"})


def _find(request: Request) -> str:
    """Return the key of the request that is asked for, by its key or its client's id. 404 too where it is another's."""
    name = request.path_params["name"]
    owner: RequestOwner = request.scope["headway.owner"]
    mine = {key: each for key, each in context(request).recovered.items() if owner.may_use(each.owner)}
    found = [name] if name in mine else [key for key, each in mine.items() if each.label == name]
    # The administration's own before those of all.
    own = [key for key in found if mine[key].owner == owner.id]
    found = own or found
    if not found:
        raise ApiError(
            404, f"no request {name[:200]!r} is kept: only those that were unfinished when a server ended are"
        )
    if len(found) > 1:
        one_of = ", ".join(found[:20])
        raise ApiError(409, f"{len(found)} requests have the id {name[:200]!r}: name an X-Headway-Id, one of {one_of}")
    return found[0]


async def _see_through(server: ServerContext, key: str, resumed: RecoveredRequest) -> None:
    """Compute the answer, keep it for `journal_keep_s` seconds, then drop it.

    When the engine was lost for good, the request stays in the journal for the next server.
    """
    # Counted like any other request, so that a drain waits for it; admission limits do not apply.
    server.in_flight += 1
    try:
        await resumed.run(run_job(server, resumed.form.job, resumed.label, resumed.records, resumed.journaled))
    finally:
        server.in_flight -= 1
    if is_unfinished(server, resumed.records):
        return
    await asyncio.sleep(server.settings.journal_keep_s)
    _drop(server, key)


def _drop(server: ServerContext, key: str) -> None:
    """Forget a recovered request: end it in the journal and stop computing it. Idempotent."""
    resumed = server.recovered.pop(key, None)
    if resumed is not None:
        resumed.journaled.end()
        if resumed.task is not None:
            resumed.task.cancel()
