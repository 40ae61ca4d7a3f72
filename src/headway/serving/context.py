"""State shared by all endpoints: one object per server, in `app.state.headway`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from headway.core.errors import HeadwayError, OverloadedError, UnavailableError
from headway.runtime.engine.protocol import EngineClient, EngineInfo
from headway.serving.access import RequestOwner
from headway.serving.errors import ApiError
from headway.serving.jobs import BodyReader, ContextNeededError, Parse, RequestContext
from headway.serving.journal import JournalWriter
from headway.serving.live.feed import ServerFeed
from headway.serving.metrics import ServerMetrics
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer
from headway.serving.tracing import RequestTracer
from headway.serving.transport import ActiveTasks

if TYPE_CHECKING:
    from headway.serving.contexts import PreparedContext
    from headway.serving.recovery import RecoveredRequest

T = TypeVar("T")

_DOCUMENTS_AT_ONCE = 4
"""Prepared documents that the engine may compute or queue at once: one begins as soon as another ends."""


@dataclass(slots=True)
class ServerContext:
    """The parts of one server, and its admission control. All methods are called on the event loop."""

    engine: EngineClient
    tokenizer: ModelTokenizer
    settings: ServerSettings
    bodies: BodyReader
    metrics: ServerMetrics
    in_flight: int = 0
    """Generation requests between the last byte of their body and that of their answer."""
    in_flight_of: Counter[str] = field(default_factory=Counter)
    """`in_flight` by owner."""
    preparing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_DOCUMENTS_AT_ONCE))
    """Limits the prepared documents in the engine; the others wait here, so that they do not fill its queue."""
    failure: HeadwayError | None = None
    """The error that kept the engine from starting."""
    journal: JournalWriter | None = None
    """None without `--journal`."""
    recovered: dict[str, RecoveredRequest] = field(default_factory=dict)
    """Requests taken over from an earlier server's journal, by the key that it gave them."""
    contexts: dict[tuple[str, str], PreparedContext] = field(default_factory=dict)
    """Prepared documents, by owner and id."""
    active: ActiveTasks = field(default_factory=ActiveTasks)
    """Tasks that compute answers, for cancellation at shutdown."""
    live: ServerFeed | None = None
    """The live page's data; None: it is off."""
    tracer: RequestTracer | None = None
    """None without `--otlp-traces-endpoint`."""
    _starting: asyncio.Future[EngineInfo] | None = field(default=None)

    async def start_engine(self) -> None:
        """Wait until the engine is ready.

        Raises the engine's ConfigError, also for a journal of another model, or UnavailableError after `cancel_start`.
        The error is kept in `failure`.
        """
        self._starting = asyncio.ensure_future(self.engine.start())
        try:
            info = await self._starting
            if self.journal is not None:
                self.journal.belongs_to(f"{info.model} ({info.architecture}, {info.parameters} parameters)")
        except asyncio.CancelledError:
            # This task itself was cancelled, and not the engine's start by `cancel_start`.
            if not self._starting.cancelled():
                raise
            self.failure = UnavailableError("stopped while the engine was starting")
            raise self.failure from None
        except HeadwayError as error:
            self.failure = error
            raise

    def close_journal(self) -> None:
        """Stop recording: requests that are unfinished now are left to the next server."""
        if self.journal is not None:
            self.journal.close()

    def find_context(self, owner: RequestOwner, name: str) -> PreparedContext:
        """Return a prepared document by id. Raises ApiError 404 for one that is unknown or another client's."""
        for key, kept in self.contexts.items():
            if key[1] == name and owner.may_use(key[0]):
                return kept
        raise ApiError(404, f"no context {name[:200]!r} is known: POST /v1/contexts makes one", "context_id")

    def release_contexts(self) -> None:
        """Cancel the tasks of prepared documents. Returns before they end."""
        for kept in self.contexts.values():
            if kept.task is not None:
                kept.task.cancel()

    def interrupt_clients(self) -> None:
        """Cancel all requests: clients get 503, or an error event in a stream. Closes the journal first. Idempotent."""
        self.close_journal()
        self.active.cancel()

    def cancel_start(self) -> None:
        """Stop waiting for an engine that is still starting."""
        if self._starting is not None:
            self._starting.cancel()

    def info(self) -> EngineInfo:
        """Return the engine's description. Raises UnavailableError unless the engine accepts requests."""
        match self.engine.state:
            case "ready" | "recovering":  # the engine queues requests until it has recovered
                return self.engine.info
            case "draining":
                raise UnavailableError("the server is finishing what it has and takes nothing new", 5.0)
            case "lost":
                raise UnavailableError("the engine is gone; the server must be restarted", 30.0)
            case _:
                raise UnavailableError("the engine is still starting", 5.0)

    def models(self) -> tuple[str, ...]:
        """Return the model names that requests may use; the first is shown in error messages."""
        return self.settings.served_model_name or (self.engine.info.model,)

    async def parse(self, request: Request, parse: Parse[T]) -> T:
        """Read the body and parse it, in another process when it is large.

        Raises UnavailableError before reading when the engine accepts nothing, ApiError 404 for a prepared document
        that is not known, and what `parse` raises.
        """
        self.info()
        # A task of its own, so that a shutdown also ends requests whose body is still arriving.
        return await self.active.begin(self._parse(request, parse))

    async def _parse(self, request: Request, parse: Parse[T]) -> T:
        owner: RequestOwner = request.scope["headway.owner"]
        async with self.bodies.read(request) as body:
            # Again: it may have ended while the body arrived.
            info = self.info()
            headers = dict(request.headers)
            about = RequestContext(headers, body.received_s, info, self.settings, self.models(), owner.id)
            try:
                return await self.bodies.parse(body, parse, about)
            except ContextNeededError as needed:
                about = replace(about, prepared=self.find_context(owner, needed.name).record)
            return await self.bodies.parse(body, parse, about)

    def check_room(self, owner: str | None) -> None:
        """Raise OverloadedError where a new request is refused, UnavailableError while the journal cannot be written.

        Called before the body is read (owner None: only the server's limits) and after it (also the owner's limit).
        """
        settings = self.settings
        if self.journal is not None:
            self.journal.check()
        most = settings.max_concurrent_requests
        if self.in_flight >= most:
            raise OverloadedError(f"{self.in_flight} requests are in flight, which is the limit; try again")
        mine = self.in_flight_of.get(owner or "", 0)
        # One of several keys leaves half of the slots to the others.
        if owner is not None and len(settings.api_keys) > 1 and mine >= max(1, most // 2):
            raise OverloadedError(f"{mine} requests of this key are in flight, half of all that may be; try again")
        # The newest stats snapshot may lag: the engine enforces its own limit as well.
        if settings.max_queued_requests and self.engine.stats.waiting >= settings.max_queued_requests:
            raise OverloadedError(f"{self.engine.stats.waiting} requests wait (max_queued_requests); try again")

    @contextmanager
    def admitted(self, owner: str) -> Iterator[None]:
        """Hold an admission slot while a generation request is alive. Raises what `check_room` raises."""
        self.check_room(owner)
        self.in_flight += 1
        self.in_flight_of[owner] += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self.in_flight_of[owner] -= 1
            if not self.in_flight_of[owner]:
                del self.in_flight_of[owner]


def context(request: Request) -> ServerContext:
    """Return the context of the server that handles `request`."""
    found = request.app.state.headway
    assert isinstance(found, ServerContext)
    return found
