"""The live `EngineClient`: starts the engine process, exchanges messages with it, and restarts it when it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from headway.core.errors import ConfigError, RequestError, UnavailableError
from headway.core.scratch_folder import ScratchFolder
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.cumulative_counters import accumulate_counters
from headway.runtime.engine.engine_child import EngineChild
from headway.runtime.engine.protocol import (
    AbortRequest,
    DrainEngine,
    EngineInfo,
    EngineSamples,
    EngineState,
    EngineStats,
    FatalError,
    IterationOutputs,
    OutputDelta,
    SubmitRequest,
)
from headway.runtime.engine.rejections import rejection_error
from headway.runtime.engine.restart_limits import GaveUpError, RestartLimit
from headway.runtime.launcher.engine_spawn import ENGINE
from headway.runtime.launcher.engine_template import TEMPLATE, EngineTemplate

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


class ProcessEngineClient:
    """The live `EngineClient` of one engine process. One for each server.

    Starts the process at construction, so that it loads while the server imports its own modules, and connects when
    `start` is awaited. An engine that dies or hangs is restarted (`RestartLimit`), with `config.standby` by a fork of a
    process that has loaded the model, and gets every unfinished request again with the output so far: streams pause.
    """

    def __init__(self, config: EngineConfig, module: str = ENGINE, template_module: str = TEMPLATE) -> None:
        self._folder = ScratchFolder("headway-engine-")
        config = msgspec.structs.replace(config, measured=f"{self._folder.path}/measured")
        self._config, self._module = config, module
        self._incarnation = 0
        self._template = EngineTemplate(config, template_module) if config.standby else None
        self._child = EngineChild(config, module, self._folder.path, 0, template=self._template)
        self._restarts = RestartLimit(config.max_restarts, "the engine", config.restart_window_s)
        self._state: EngineState = "starting"
        self._info: EngineInfo | None = None
        self._stats = self._stats_at_restart = EngineStats()
        self._streams: dict[str, _ResponseStream] = {}
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._drained = asyncio.Event()
        self._draining = False
        self._receive_samples: Callable[[int, EngineSamples], None] | None = None
        self.failure: str | None = None
        """Why the engine could not start or go on; None while it can."""

    @property
    def state(self) -> EngineState:
        if self._draining and self._state != "lost":
            return "draining"
        return "recovering" if self._state == "ready" and self._stats.recovering else self._state

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise UnavailableError("the engine is still starting")
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def pid(self) -> int:
        """The engine's process id, for tests and operators; 0 until it is forked."""
        return self._child.process.pid or 0

    def on_samples(self, receive: Callable[[int, EngineSamples], None]) -> None:
        """See `SampledEngine`."""
        self._receive_samples = receive

    async def start(self) -> EngineInfo:
        """See `EngineClient.start`. May be awaited several times; the outcome is shared."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._supervise(self._ready))
        try:
            # A cancelled caller must not cancel the future that the others await.
            return await asyncio.shield(self._ready)
        except ConfigError as error:
            self.failure = str(error)
            raise

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
                self._child.send([_encoder.encode(submit), prompt])
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
                self._child.send([_encoder.encode(AbortRequest(submit.id))])

    async def drain(self) -> None:
        if self._state in ("lost", "starting"):
            return
        self._draining = True
        if self._state == "ready":
            self._child.send([_encoder.encode(DrainEngine())])
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
        self._child.end()
        if self._template is not None:
            self._template.kill()
        self._folder.close()

    # -- one incarnation after another --------------------------------------------------------------------------

    async def _supervise(self, ready: asyncio.Future[EngineInfo]) -> None:
        """Watch one incarnation after another until none follows. An error in here fails all waiting callers."""
        try:
            while self._restart_or_fail(await self._watch_engine(ready), ready):
                pass
        except Exception as error:
            log.exception("the engine's process cannot be looked after")
            self._fail(f"the engine cannot be looked after: {error}")
            if not ready.done():
                ready.set_exception(ConfigError(self.failure))
            self._child.end(at_once=True)
        finally:
            self._mark_lost()

    async def _watch_engine(self, ready: asyncio.Future[EngineInfo]) -> str:
        """Receive an engine's messages until it is gone. Returns how it ended. Raises what receiving raises."""
        listening = asyncio.create_task(self._listen(ready))
        going = asyncio.create_task(self._child.wait_until_exited())
        try:
            await asyncio.wait((listening, going), return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                # Raises the error of an undecodable message; a listener does not return otherwise.
                listening.result()
            return f"the engine process {await going}"
        finally:
            listening.cancel()
            going.cancel()

    def _restart_or_fail(self, why: str, ready: asyncio.Future[EngineInfo]) -> bool:
        """Restart an engine that is gone, or fail; returns whether it was restarted.

        An error that the engine called final is final, unless that engine never became ready after a restart.
        """
        fatal = self._child.fatal_error
        if not ready.done():
            ready.set_exception(ConfigError(f"{why} while starting" if fatal is None else fatal.error))
        # The expected end after a drain: neither a failure nor a restart.
        elif self._draining and self._child.process.returncode == 0:
            pass
        elif fatal is not None and fatal.final and self._child.served:
            self._fail(fatal.error)
        else:
            return self._restart(why if fatal is None else fatal.error)
        return False

    def _restart(self, why: str) -> bool:
        """Start the next incarnation. False when the limit of restarts is reached."""
        try:
            self._restarts.spend(time.monotonic(), why)
        except GaveUpError as error:
            self._fail(str(error))
            return False
        log.warning("%s; starting it again, with %d requests", why, len(self._streams))
        self._state = "recovering"
        # Base of the new incarnation's counters, which start at 0: totals never fall.
        self._stats = self._stats_at_restart = accumulate_counters(self._stats, EngineStats(engine_restarts_total=1))
        self._child.end(at_once=True)
        self._incarnation += 1
        config = self._config
        if config.kv_cache_bytes is None:  # however little is free now: what was accepted must fit again
            config = msgspec.structs.replace(config, kv_cache_bytes=self.info.kv_bytes)
        if config.event_log is not None:  # the log of the one that is gone stays
            config = msgspec.structs.replace(config, event_log=f"{config.event_log}.{self._incarnation}")
        self._child = EngineChild(config, self._module, self._folder.path, self._incarnation, template=self._template)
        return True

    async def _listen(self, ready: asyncio.Future[EngineInfo]) -> None:
        child = self._child
        while True:
            message = await child.receive()
            if isinstance(message, IterationOutputs):
                if message.stats is not None:
                    self._stats = accumulate_counters(self._stats_at_restart, message.stats)
                if message.samples is not None and self._receive_samples is not None:
                    self._receive_samples(0, message.samples)
                for delta in message.deltas:
                    stream = self._streams.get(delta.id)
                    # None: the client has left, and its abort is on the way.
                    if stream is not None:
                        stream.take(delta)
            elif isinstance(message, EngineInfo):
                self._info, self._state = message, "ready"
                child.ready()
                self._restarts.record_up(time.monotonic())
                if not ready.done():
                    ready.set_result(message)
                self._resubmit(child)
            elif isinstance(message, FatalError):
                child.fatal_error = message
                # The error of a start is the caller's to report.
                if ready.done():
                    log.error(message.error)

    def _resubmit(self, child: EngineChild) -> None:
        """Send unfinished requests of an earlier incarnation to a new one."""
        for stream in self._streams.values():
            if not stream.finished:
                submit = msgspec.structs.replace(stream.submit, resubmitted=True, output=tuple(stream.output))
                child.send([_encoder.encode(submit), stream.prompt])
        # The drain request was lost with the engine that got it.
        if self._draining:
            child.send([_encoder.encode(DrainEngine())])

    def _fail(self, why: str) -> None:
        self.failure = why
        log.error("the engine is lost for good: %s", why)

    def _mark_lost(self) -> None:
        """Fail all streams for good. Counters stay; gauges of running and waiting requests become 0."""
        self._state = "lost"
        self._stats = accumulate_counters(self._stats, EngineStats())
        self._drained.set()
        for stream in self._streams.values():
            stream.deltas.put_nowait(None)
