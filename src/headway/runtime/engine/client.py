"""The live `EngineClient`: starts the engine process, exchanges messages with it, and restarts it when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec
from typing_extensions import override

from headway.core.errors import ConfigError, RequestError, UnavailableError
from headway.core.files import ScratchFolder
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.process import (
    ENDED_IN_ORDER,
    EngineProcess,
    EngineSupervisor,
    Message,
    start_engine,
)
from headway.runtime.engine.protocol import (
    AbortRequest,
    EndProcess,
    EngineClient,
    EngineInfo,
    EngineSamples,
    EngineState,
    EngineStats,
    FatalError,
    IterationOutputs,
    OutputDelta,
    SampledEngine,
    SubmitRequest,
)
from headway.runtime.engine.requests import rejection_error
from headway.runtime.launcher.processes import ENGINE
from headway.runtime.launcher.standby import TEMPLATE, EngineTemplate

log = logging.getLogger("headway.server")

_encoder = msgspec.msgpack.Encoder()
_ENDS = "the server is ending; send the request again later"


class _ResponseStream:
    """A request that the server has accepted: all that a restarted engine needs to continue it."""

    __slots__ = ("deltas", "finished", "output", "prompt", "submit")

    def __init__(self, submit: SubmitRequest, prompt: bytes | memoryview) -> None:
        self.submit = submit
        self.prompt = prompt
        self.output: list[int] = list(submit.output)
        self.deltas: asyncio.Queue[OutputDelta | None] = asyncio.Queue()
        self.finished = False

    def take(self, delta: OutputDelta) -> None:
        self.output.extend(delta.tokens)
        self.finished = delta.finish is not None
        self.deltas.put_nowait(delta)


class ProcessEngineClient(EngineClient, SampledEngine):
    """The live `EngineClient` of one engine process. One for each server.

    Starts the process at construction, so that it loads while the server imports its own modules, and connects when
    `start` is awaited. An engine that dies or hangs is restarted (`RestartLimit`), with `config.standby` by a fork of a
    process that has loaded the model, and gets every unfinished request again with the output so far: streams pause.
    """

    def __init__(self, config: EngineConfig, module: str = ENGINE, template_module: str = TEMPLATE) -> None:
        self._folder = ScratchFolder("headway-engine-")
        config = msgspec.structs.replace(config, measured=f"{self._folder.path}/measured")
        self._template = template = EngineTemplate(config, template_module) if config.standby else None

        def launch(config: EngineConfig, incarnation: int) -> EngineProcess:
            return start_engine(config, module, self._folder.path, incarnation, template)

        self._engine = EngineSupervisor(config, launch, ("the engine process", "the engine"))
        self._state: EngineState = "starting"
        self._streams: dict[str, _ResponseStream] = {}
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._drained = asyncio.Event()
        self._draining = False
        self._receive_samples: Callable[[int, EngineSamples], None] | None = None

    @property
    def failure(self) -> str | None:
        """Why the engine could not start or go on; None while it can."""
        return self._engine.failure

    @property
    def state(self) -> EngineState:
        if self._draining and self._state != "lost":
            return "draining"
        return "recovering" if self._state == "ready" and self.stats.recovering else self._state

    @property
    def info(self) -> EngineInfo:
        if self._engine.info is None:
            raise UnavailableError("the engine is still starting")
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def pid(self) -> int:
        """The engine's process id, for tests and operators; 0 until it is forked."""
        return self._engine.process.pid or 0

    @override
    def on_samples(self, receive: Callable[[int, EngineSamples], None]) -> None:
        self._receive_samples = receive

    @override
    async def start(self) -> EngineInfo:
        """May be awaited several times; the outcome is shared."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._supervise(self._ready))
        # A cancelled caller must not cancel the future that the others await.
        return await asyncio.shield(self._ready)

    async def generate(self, submit: SubmitRequest, prompt: bytes | memoryview) -> AsyncIterator[OutputDelta]:
        if self._state == "lost":
            raise UnavailableError(self.failure or _ENDS)
        if self.state in ("starting", "draining"):
            raise UnavailableError(f"the engine is {self.state}", 5.0)
        if submit.id in self._streams:
            raise RequestError(f"request id {submit.id!r} is in use", "id")
        stream = self._streams[submit.id] = _ResponseStream(submit, prompt)
        finished = False
        try:
            # While the engine restarts, the stream only waits: `_resubmit` sends it when the engine is ready.
            if self._state == "ready":
                self._engine.process.send([_encoder.encode(submit), prompt])
            while not finished:
                delta = await stream.deltas.get()
                if delta is None:
                    finished = True
                    raise UnavailableError(self.failure or _ENDS)
                finished = delta.finish is not None
                if (error := rejection_error(delta)) is not None:
                    raise error
                yield delta
        finally:
            self._streams.pop(submit.id, None)
            # Left early by the caller: free the request's KV.
            if not finished and self._state == "ready":
                self._engine.process.send([_encoder.encode(AbortRequest(submit.id))])

    async def drain(self) -> None:
        if self._state in ("lost", "starting"):
            return
        self._draining = True
        if self._state == "ready":
            self._engine.process.send([_encoder.encode(EndProcess())])
        await self._drained.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(UnavailableError("the server is closing"))
            self._ready.exception()  # retrieved, in case no caller awaits it
        self.end()

    def end(self) -> None:
        """End the engine without an event loop. May be called repeatedly."""
        self._mark_lost()
        if self._template is not None and not self._template.loaded:
            self._template.kill()  # with the engine that was to be forked
        self._engine.process.end()
        if self._template is not None:
            self._template.kill()
        self._folder.close()

    # -- one incarnation after another --------------------------------------------------------------------------

    async def _supervise(self, ready: asyncio.Future[EngineInfo]) -> None:
        """Watch one process after another until none follows. An error in here fails all waiting callers."""
        engine = self._engine
        try:
            while not self._ended_in_order(why := await engine.watch(partial(self._receive, ready))):
                self._state = "recovering"
                if not engine.replace(why):
                    # The error of a start is the caller's to report.
                    if ready.done():
                        log.error("the engine is lost for good: %s", engine.failure)
                    break
        except Exception as error:
            log.exception("the engine's process cannot be looked after")
            engine.failure = f"the engine cannot be looked after: {error}"
            engine.process.end(at_once=True)
        finally:
            if not ready.done() and engine.failure is not None:
                ready.set_exception(ConfigError(engine.failure))
            self._mark_lost()

    def _ended_in_order(self, why: str) -> bool:
        """Whether a process has ended as expected after a drain: neither a failure nor a restart."""
        return self._draining and why == f"the engine process {ENDED_IN_ORDER}"

    def _receive(self, ready: asyncio.Future[EngineInfo], message: Message) -> None:
        """Handle one message of the process; the supervisor has taken in stats, report and error."""
        if isinstance(message, IterationOutputs):
            if message.samples is not None and self._receive_samples is not None:
                self._receive_samples(0, message.samples)
            for delta in message.deltas:
                stream = self._streams.get(delta.id)
                # None: the client has left, and its abort is on the way.
                if stream is not None:
                    stream.take(delta)
        elif isinstance(message, EngineInfo):
            self._state = "ready"
            if not ready.done():
                ready.set_result(message)
            self._resubmit()
        # The error of a start is the caller's to report.
        elif isinstance(message, FatalError) and ready.done():
            log.error(message.error)

    def _resubmit(self) -> None:
        """Send unfinished requests of an earlier process to a new one."""
        for stream in self._streams.values():
            if not stream.finished:
                submit = msgspec.structs.replace(stream.submit, resubmitted=True, output=tuple(stream.output))
                self._engine.process.send([_encoder.encode(submit), stream.prompt])
        # The drain request was lost with the engine that got it.
        if self._draining:
            self._engine.process.send([_encoder.encode(EndProcess())])

    def _mark_lost(self) -> None:
        """Fail all streams for good. Counters stay; gauges of running and waiting requests become 0."""
        self._state = "lost"
        self._engine.clear_gauges()
        self._drained.set()
        for stream in self._streams.values():
            stream.deltas.put_nowait(None)
