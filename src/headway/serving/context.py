"""State that all endpoints share: one object per server, held in `app.state.headway`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from headway.core.errors import HeadwayError, OverloadedError, UnavailableError
from headway.runtime.engine.protocol import EngineClient, EngineInfo
from headway.serving.active_tasks import ActiveTasks
from headway.serving.body import BodyReader
from headway.serving.body_fields import BodyFields
from headway.serving.generation_job import RequestContext
from headway.serving.journal import RequestJournal
from headway.serving.metrics import ServerMetrics
from headway.serving.prompts import PromptReader
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from headway.serving.recovered_requests import RecoveredRequest

T = TypeVar("T")


@dataclass(slots=True)
class ServerContext:
    """The server's parts."""

    engine: EngineClient
    tokenizer: ModelTokenizer
    settings: ServerSettings
    bodies: BodyReader
    metrics: ServerMetrics
    in_flight: int = 0
    """Generation requests between acceptance and their last byte."""
    failure: HeadwayError | None = None
    """Why the engine did not start."""
    journal: RequestJournal | None = None
    recovered: dict[str, RecoveredRequest] = field(default_factory=dict)
    """Requests that the journal had from an earlier server, by id."""
    active: ActiveTasks = field(default_factory=ActiveTasks)
    _starting: asyncio.Future[EngineInfo] | None = field(default=None)
    _reader: PromptReader | None = field(default=None)

    async def start_engine(self) -> None:
        """Wait until the engine is ready. Raises its ConfigError, or UnavailableError when `cancel_start` was
        called."""
        self._starting = asyncio.ensure_future(self.engine.start())
        try:
            info = await self._starting
            if self.journal is not None:
                self.journal.belongs_to(f"{info.model} ({info.architecture}, {info.parameters} parameters)")
        except asyncio.CancelledError:
            if not self._starting.cancelled():
                raise
            self.failure = UnavailableError("stopped while the engine was starting")
            raise self.failure from None
        except HeadwayError as error:
            self.failure = error
            raise

    def close_journal(self) -> None:
        """Leave what has not been answered by now in the journal, to the next server."""
        if self.journal is not None:
            self.journal.close()

    def interrupt_clients(self) -> None:
        """End all requests: clients get 503, or an error event in a stream, and the journal is closed. Harmless when
        repeated."""
        self.close_journal()
        self.active.cancel()

    def cancel_start(self) -> None:
        """Stop waiting for an engine that is still starting."""
        if self._starting is not None:
            self._starting.cancel()

    def info(self) -> EngineInfo:
        """The engine's description; raises UnavailableError unless it is ready to take requests."""
        match self.engine.state:
            case "ready" | "recovering":  # requests that come meanwhile wait
                return self.engine.info
            case "draining":
                raise UnavailableError("the server is finishing what it has and takes nothing new", 5.0)
            case "lost":
                raise UnavailableError("the engine is gone; the server must be restarted", 30.0)
            case _:
                raise UnavailableError("the engine is still starting", 5.0)

    def models(self) -> tuple[str, ...]:
        """The names this server answers to; the first is the one shown."""
        return self.settings.served_model_name or (self.engine.info.model,)

    def prompts(self, info: EngineInfo) -> PromptReader:
        """Reads prompts for this engine's vocabulary."""
        if self._reader is None:
            self._reader = PromptReader(self.tokenizer, info.vocab_size, self.settings.max_prompts)
        return self._reader

    async def parse(self, request: Request, parse: Callable[[BodyFields, RequestContext, PromptReader], T]) -> T:
        """Read the body and parse it, in a worker thread when it is large. 503 before a byte is read, if it must be."""
        info = self.info()
        reader = self.prompts(info)
        models = self.models()

        def work(body: bytearray, received_s: float) -> T:
            asked = RequestContext(request.headers, received_s, info, self.settings, models)
            return parse(BodyFields.parse(body), asked, reader)

        return await self.active.begin(self.bodies.parse(request, work))

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Held while a generation request is alive. Raises OverloadedError at the limits."""
        settings = self.settings
        if self.in_flight >= settings.max_concurrent_requests:
            raise OverloadedError(f"{self.in_flight} requests are in flight (max_concurrent_requests); try again")
        if settings.max_queued_requests and self.engine.stats.waiting >= settings.max_queued_requests:
            raise OverloadedError(f"{self.engine.stats.waiting} requests wait (max_queued_requests); try again")
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


def context(request: Request) -> ServerContext:
    """The context of the server that answers `request`."""
    found = request.app.state.headway
    assert isinstance(found, ServerContext)
    return found
