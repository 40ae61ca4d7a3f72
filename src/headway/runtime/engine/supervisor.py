"""The supervisor of an engine's processes, one after another, with the correction of times from another
host's clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from headway.core.errors import ConfigError
from headway.runtime.engine.config import EngineConfig, GaveUpError, RestartLimit, accumulate_counters
from headway.runtime.engine.protocol import (
    EngineInfo,
    EngineSamples,
    EngineStats,
    FatalError,
    FromInstance,
    IterationOutputs,
    KvArrived,
    OutputDelta,
    SpanTaskDone,
)

log = logging.getLogger("headway.engine")

Message = EngineInfo | IterationOutputs | FatalError | FromInstance


class HasPid(Protocol):
    """A process of the system."""

    @property
    def pid(self) -> int | None: ...


class EngineProcess(Protocol):
    """The part of `runtime.engine.process.EngineChild` that is used here; tests have a double."""

    fatal_error: FatalError | None
    served: bool

    @property
    def ahead_s(self) -> float: ...

    @property
    def abandoned(self) -> bool: ...

    @property
    def process(self) -> HasPid: ...

    def send(self, frames: Sequence[Any]) -> None: ...

    def receive(self) -> Coroutine[Any, Any, Message]: ...

    def ready(self) -> None: ...

    def wait_until_exited(self) -> Coroutine[Any, Any, str]: ...

    def end(self, at_once: bool = False) -> None: ...


class EngineSupervisor:
    """Starts an engine's process at construction, watches it, and starts another when that is gone, within limits.

    launch: starts a process of (settings, number of processes before it). names: the process and the engine, in words
    that errors use. where: added to the error that a process itself reports. clock: seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        launch: Callable[[EngineConfig, int], EngineProcess],
        names: tuple[str, str],
        incarnation: int = 0,
        where: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.incarnation = config, incarnation
        self._launch, self._where, self._clock = launch, where, clock
        self._process_name, self._name = names
        self.info: EngineInfo | None = None
        """The last process's report; None before the first is ready."""
        self.stats = self._before = EngineStats()
        """The newest snapshot, with the counters of earlier processes added."""
        self.failure: str | None = None
        """Why it could not start, or was given up."""
        self._ended_here = False
        """Whether the process was ended by `end`: then its channel's errors mean nothing."""
        self.process = launch(config, incarnation)
        self._restarts = RestartLimit(config.max_restarts, self._name, config.restart_window_s)

    async def watch(self, receive: Callable[[Message], None]) -> str:
        """Give a process's messages to `receive` until it is gone; return why, as a sentence.

        Raises what receiving raises.
        """
        listening = asyncio.create_task(self._listen(receive))
        going = asyncio.ensure_future(self.process.wait_until_exited())
        try:
            await asyncio.wait((listening, going), return_when=asyncio.FIRST_COMPLETED)
            if self._ended_here:
                return f"{self._process_name} was ended"
            if listening.done():
                listening.result()
            how = await going
        finally:
            for task in (listening, going):
                task.cancel()
                task.add_done_callback(_seen)
        fatal = self.process.fatal_error
        return f"{self._process_name} {how}" if fatal is None else f"{fatal.error}{self._where}"

    def replace(self, why: str) -> bool:
        """Start another process in place of one that is gone; False: it is given up (`failure`).

        Given up are an engine that never started, one whose host has not come back, and one that served and reported a
        final error; and any after too many restarts. Raises ConfigError when the system can start none.
        """
        process, fatal = self.process, self.process.fatal_error
        process.end(at_once=True)
        if self.info is None or process.abandoned or (fatal is not None and fatal.final and process.served):
            self.failure = why if fatal is not None or self.info is not None else f"{why} while starting"
            return False
        try:
            self._restarts.spend(self._clock(), why)
        except GaveUpError as error:
            self.failure = str(error)
            return False
        log.warning("%s; starting it again", why)
        self.incarnation += 1
        # Base of the new process's counters, which start at 0: totals never fall.
        self.stats = self._before = accumulate_counters(self.stats, EngineStats(engine_restarts_total=1))
        config = self.config
        # The same pool size as before: accepted requests rely on it, however little memory is free now.
        if config.kv_cache_bytes is None:
            config = msgspec.structs.replace(config, kv_cache_bytes=self.info.kv_bytes)
        # A file of its own: the event log of the lost process is kept.
        if config.event_log is not None:
            config = msgspec.structs.replace(config, event_log=f"{config.event_log}.{self.incarnation}")
        try:
            self.process, self._ended_here = self._launch(config, self.incarnation), False
        except OSError as error:
            raise ConfigError(f"{self._name} cannot be started again: {error}") from error
        return True

    def clear_gauges(self) -> None:
        """Record that nothing runs: counters stay, gauges are zero."""
        self.stats = accumulate_counters(self.stats, EngineStats())

    def end(self) -> None:
        """End the process at once; `watch` returns."""
        self._ended_here = True
        self.process.end(at_once=True)

    async def _listen(self, receive: Callable[[Message], None]) -> None:
        process = self.process
        while True:
            message = await process.receive()
            if isinstance(message, IterationOutputs) and message.stats is not None:
                self.stats = accumulate_counters(self._before, message.stats)
            elif isinstance(message, EngineInfo):
                process.ready()
                self._restarts.record_up(self._clock())
                self.info = message
            elif isinstance(message, FatalError):
                process.fatal_error = message
            receive(message)


def _seen(task: asyncio.Future[Any]) -> None:
    """Retrieve a cancelled task's exception, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()


def by_our_clock(message: Message, ahead_s: float) -> Message:
    """Return the message with `ahead_s` added to all times."""
    match message:
        case IterationOutputs(deltas=deltas, samples=samples):
            moved_samples = None if samples is None else _samples(samples, ahead_s)
            return replace(message, deltas=tuple(_delta(each, ahead_s) for each in deltas), samples=moved_samples)
        case SpanTaskDone(delta=delta):
            moved = None if delta is None else _delta(delta, ahead_s)
            began_s, ended_s = message.began_s + ahead_s, message.ended_s + ahead_s
            return replace(message, began_s=began_s, ended_s=ended_s, delta=moved)
        # Other messages carry no times.
        case KvArrived():
            return replace(message, began_s=message.began_s + ahead_s, ended_s=message.ended_s + ahead_s)
    return message


def _samples(samples: EngineSamples, ahead_s: float) -> EngineSamples:
    iterations = (
        replace(one, decided_s=one.decided_s + ahead_s, start_s=one.start_s + ahead_s, end_s=one.end_s + ahead_s)
        for one in samples.iterations
    )
    return EngineSamples(tuple(iterations), tuple(replace(one, due_s=one.due_s + ahead_s) for one in samples.waiting))


def _delta(delta: OutputDelta, ahead_s: float) -> OutputDelta:
    """Correct a delta. A time of 0 is unknown and stays."""
    first_s = delta.first_scheduled_s
    return replace(
        delta,
        emitted_s=delta.emitted_s and delta.emitted_s + ahead_s,
        first_scheduled_s=None if first_s is None else first_s + ahead_s,
    )
