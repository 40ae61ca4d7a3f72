"""One instance of a cluster as the controller sees it: process after process under one number.

Unlike `runtime.engine.client`, nothing is recovered when a process is lost: all KV on it is gone, and an empty process
takes its place. The controller, which gets `InstanceListener.lost`, restarts the requests that were there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol

import msgspec

from headway.core.errors import ConfigError
from headway.policy.placement.view import ClusterInstance, Role
from headway.runtime.cluster.messages import FromInstance
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.cumulative_counters import accumulate_counters
from headway.runtime.engine.protocol import (
    AbortRequest,
    DrainEngine,
    EngineInfo,
    EngineSamples,
    EngineStats,
    FatalError,
    IterationOutputs,
    OutputDelta,
    SubmitRequest,
)
from headway.runtime.engine.restart_limits import GaveUpError, RestartLimit
from headway.runtime.kv_transfer.peer import PeerAddress

log = logging.getLogger("headway.cluster")

_encoder = msgspec.msgpack.Encoder()

InstanceState = Literal["starting", "ready", "draining", "lost", "failed", "left"]
"""lost: its process is gone and another one starts; failed: restarts were given up; left: it was drained and ended."""


class HasPid(Protocol):
    """A process of the system."""

    @property
    def pid(self) -> int | None: ...


class InstanceProcess(Protocol):
    """The part of `runtime.engine.engine_child.EngineChild` that an instance uses; tests have a double."""

    fatal_error: FatalError | None
    served: bool

    @property
    def ahead_s(self) -> float: ...

    @property
    def abandoned(self) -> bool: ...

    @property
    def process(self) -> HasPid: ...

    def send(self, frames: Sequence[Any]) -> None: ...

    def receive(self) -> Coroutine[Any, Any, EngineInfo | IterationOutputs | FatalError | FromInstance]: ...

    def ready(self) -> None: ...

    def wait_until_exited(self) -> Coroutine[Any, Any, str]: ...

    def end(self, at_once: bool = False) -> None: ...


Launch = Callable[[EngineConfig, int], InstanceProcess]
"""(settings, number of processes that had the number before) to a process that is starting."""


class InstanceListener(Protocol):
    """Called on the event loop with what happens to instances, in order."""

    def joined(self, number: int) -> None:
        """A process is ready and empty: the first, or a new one."""

    def said(self, number: int, message: FromInstance) -> None:
        """A message about a span task, a KV slice or a reservation has come."""

    def heard(self, number: int, delta: OutputDelta) -> None:
        """The scheduler has emitted output of a request, or its end."""

    def measured(self, number: int) -> None:
        """A new stats snapshot has come."""

    def sampled(self, number: int, samples: EngineSamples) -> None:
        """Samples of its iterations have come, for the live page."""

    def lost(self, number: int, why: str) -> None:
        """The process is gone, after `joined`. The instance's state shows what follows."""

    def ended(self, number: int) -> None:
        """The instance has left or was given up: nothing follows."""


def initial_instance(number: int, node: int, role: Role, config: EngineConfig, kv_tokens: int) -> ClusterInstance:
    """Return an instance without any requests, as policies see it."""
    tp, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    return ClusterInstance(id=number, node=node, role=role, tp=tp, stages=stages, capacity=kv_tokens)


class LiveInstance:
    """An instance, started at construction, so that it loads while the controller's process imports its own modules.

    `look_after` runs for as long as the instance has a process.
    """

    def __init__(
        self,
        number: int,
        role: Role,
        node: int,
        pool: int,
        config: EngineConfig,
        launch: Launch,
        incarnation: int = 0,
        host: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """pool: index of the cluster file's pool. incarnation: number of processes that had the number before. host:
        where `launch` starts them. clock: seconds, of the same clock as the controller's."""
        self.number, self.role, self.node, self.pool, self.host = number, role, node, pool, host
        self.config, self._clock = config, clock
        self.state: InstanceState = "starting"
        self.incarnation = incarnation
        self.info: EngineInfo | None = None
        self.failure: str | None = None
        """Why it could not start, or was given up."""
        self._stats = self._before = EngineStats()
        self._launch = launch
        self._ended = False
        """Whether its process was ended from here, for good."""
        self._doomed: str | None = None
        """Why its process was ended from here, to be started again, unless it was given up."""
        self._given_up = False
        self._process = launch(config, incarnation)
        self._restarts = RestartLimit(config.max_restarts, f"instance {number}", config.restart_window_s)
        self.heard_s = self._clock()
        """Time of the last message: an engine sends stats several times a second, whatever it does."""

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot, with the counters of earlier processes added."""
        return self._stats

    @property
    def serves(self) -> bool:
        """Whether the instance can be given work."""
        return self.state in ("ready", "draining")

    @property
    def moves_kv(self) -> bool:
        """Whether KV can move from and to this instance.

        It can then compute spans in a group too, with instances of as many processes; else only whole prompts, on its
        scheduler.
        """
        return self.info is not None and self.info.peer_address is not None

    @property
    def ranks(self) -> int:
        """Number of its processes that take part in a span task."""
        return 1 if self.info is None else 1 + len(self.info.peer_others)

    @property
    def pid(self) -> int:
        """Process id now; 0 until its host has reported it."""
        return self._process.process.pid or 0

    @property
    def initial_instance(self) -> ClusterInstance:
        """The instance without any requests, as policies see it."""
        kv_tokens = 0 if self.info is None else self.info.kv_tokens_total
        return initial_instance(self.number, self.node, self.role, self.config, kv_tokens)

    @property
    def peer(self) -> PeerAddress | None:
        """Address for other instances; None when they cannot reach this one."""
        if self.info is None or self.info.peer_address is None or not self.serves:
            return None
        return PeerAddress(self.number, self.incarnation, self.info.peer_address, self.info.peer_others)

    def tell(self, message: msgspec.Struct, *frames: Any) -> None:
        """Send a message. Never blocks; what the process has not read when it ends is lost with it."""
        if self.serves:
            self._process.send([_encoder.encode(message), *frames])

    def submit(self, submit: SubmitRequest, prompt: bytes | memoryview) -> None:
        """Give the scheduler a request. The engine's own queue limit does not apply: the cluster has one."""
        # On another host the monotonic clock differs: times leave in the instance's clock.
        received_s = submit.received_s - self._process.ahead_s
        self.tell(msgspec.structs.replace(submit, resubmitted=True, received_s=received_s), prompt)

    def abort(self, name: str) -> None:
        """Remove a request from the scheduler, with its KV."""
        self.tell(AbortRequest(name))

    def drain(self) -> None:
        """Finish what is there, take nothing new, then end. The state becomes `left`."""
        if self.serves:
            self.tell(DrainEngine())
        else:
            self._ended = True
            self._process.end(at_once=True)
        if self.state != "failed":
            self.state = "draining"

    def fail(self, why: str) -> None:
        """Give up an instance that cannot be part of this cluster."""
        self._fail(why)
        self._ended = True
        self._process.end(at_once=True)

    def restart(self, why: str, for_good: bool) -> None:
        """End the process at once, as if it had been lost. for_good: without starting another one."""
        self._doomed, self._given_up = why, for_good
        self._process.end(at_once=True)

    def end(self) -> None:
        """End the process, whatever it is doing. Harmless when repeated."""
        if self.state not in ("failed", "left"):
            self.state = "left"
        self._process.end()

    # -- one process after another ----------------------------------------------------------------------------------

    async def look_after(self, listener: InstanceListener) -> None:
        """Run the instance's processes, one after another, until it has left or is given up; report to `listener`."""
        try:
            while True:
                why = await self._live(listener)
                served, leaves = self._process.served, self.state == "draining"
                if self.state == "failed":
                    break
                fatal = self._process.fatal_error
                where = f" (on host {self.host})" if self.host else ""
                why = f"the process of instance {self.number} {why}" if fatal is None else f"{fatal.error}{where}"
                why, self._doomed = self._doomed or why, None
                self._process.end(at_once=True)
                # The state before the listener: it must not place anything here while it handles the loss.
                self.state = "left" if leaves else "lost"
                # Counters stay, gauges fall to zero with the process.
                self._stats = accumulate_counters(self._stats, EngineStats())
                if served:
                    listener.lost(self.number, why)
                # Asked again: the listener may have drained the instance while it handled the loss.
                if leaves or self._leaves():
                    self.state = "left"
                    break
                if not self._goes_on(why, served, fatal):
                    break
        except Exception as error:
            log.exception("instance %d cannot be looked after", self.number)
            self._fail(f"it cannot be looked after: {error}")
            self._process.end(at_once=True)
            listener.lost(self.number, str(error))
        listener.ended(self.number)

    def _leaves(self) -> bool:
        """Whether the instance is being drained."""
        return self.state == "draining"

    async def _live(self, listener: InstanceListener) -> str:
        """Receive a process's messages until it is gone; return how it ended."""
        listening = asyncio.create_task(self._listen(listener))
        going = asyncio.ensure_future(self._process.wait_until_exited())
        try:
            await asyncio.wait((listening, going), return_when=asyncio.FIRST_COMPLETED)
            # Ended from here: the socket was closed from this side, and its error says nothing about the process.
            if self._ended or self._doomed is not None:
                return "was ended"
            if listening.done():
                listening.result()
            return await going
        finally:
            for task in (listening, going):
                task.cancel()
                task.add_done_callback(_seen)

    async def _listen(self, listener: InstanceListener) -> None:
        process = self._process
        while True:
            message = await process.receive()
            self.heard_s = self._clock()
            if isinstance(message, IterationOutputs):
                # Before the deltas: what follows from a token is decided by the newest free blocks.
                if message.stats is not None:
                    self._stats = accumulate_counters(self._before, message.stats)
                    listener.measured(self.number)
                if message.samples is not None:
                    listener.sampled(self.number, message.samples)
                for delta in message.deltas:
                    listener.heard(self.number, delta)
            elif isinstance(message, EngineInfo):
                process.ready()
                self._restarts.record_up(self._clock())
                self.info = message
                if self.state != "draining":
                    self.state = "ready"
                listener.joined(self.number)
            elif isinstance(message, FatalError):
                process.fatal_error = message
                log.error("instance %d: %s", self.number, message.error)
            else:
                listener.said(self.number, message)

    def _goes_on(self, why: str, served: bool, fatal: FatalError | None) -> bool:
        """Start another process; False: the instance is given up.

        Given up are an instance that never started, one whose host has not come back, one that `restart` ended for
        good, and one that served and reported a final error; and any after too many restarts.
        """
        first = self.info is None
        if first or self._process.abandoned or (fatal is not None and fatal.final and served):
            self._fail(why if fatal is not None or not first else f"{why} while starting")
            return False
        if self._given_up:
            self._fail(why)
            return False
        try:
            self._restarts.spend(self._clock(), why)
        except GaveUpError as error:
            self._fail(str(error))
            return False
        self._begin_again(why)
        return True

    def _begin_again(self, why: str) -> None:
        log.warning("%s; starting it again", why)
        self.incarnation += 1
        self._stats = self._before = accumulate_counters(self._stats, EngineStats(engine_restarts_total=1))
        config = self.config
        # The same pool size as before: accepted requests rely on it, however little memory is free now.
        if config.kv_cache_bytes is None and self.info is not None:
            config = msgspec.structs.replace(config, kv_cache_bytes=self.info.kv_bytes)
        # A file of its own: the event log of the lost process is kept.
        if config.event_log is not None:
            config = msgspec.structs.replace(config, event_log=f"{config.event_log}.{self.incarnation}")
        try:
            self._process = self._launch(config, self.incarnation)
        except OSError as error:
            raise ConfigError(f"instance {self.number} cannot be started again: {error}") from error

    def _fail(self, why: str) -> None:
        self.state, self.failure = "failed", why
        log.error("instance %d is lost for good: %s", self.number, why)


def _seen(task: asyncio.Future[Any]) -> None:
    """Retrieve a cancelled task's exception, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()
