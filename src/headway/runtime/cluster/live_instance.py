"""One instance of a cluster as the controller sees it: process after process under one number.

Unlike `runtime.engine.client`, nothing is recovered when a process is lost: all KV on it is gone, and an empty process
takes its place. The controller, which gets `InstanceListener.lost`, restarts the requests that were there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import msgspec

from headway.policy.placement.view import ClusterInstance, Role
from headway.runtime.cluster.cached_keys import CachedKeys
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.engine_supervisor import EngineProcess, EngineSupervisor, Message
from headway.runtime.engine.instance_protocol import FromInstance
from headway.runtime.engine.protocol import (
    EndProcess,
    EngineInfo,
    EngineSamples,
    EngineStats,
    FatalError,
    IterationOutputs,
    OutputDelta,
    SubmitRequest,
)
from headway.runtime.kv_transfer.peer import PeerAddress

log = logging.getLogger("headway.cluster")

_encoder = msgspec.msgpack.Encoder()

InstanceState = Literal["starting", "ready", "draining", "lost", "failed", "left"]
"""lost: its process is gone and another one starts; failed: restarts were given up; left: it was drained and ended."""


Launch = Callable[[EngineConfig, int], EngineProcess]
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
        names = f"the process of instance {number}", f"instance {number}"
        where = f" (on host {host})" if host else ""
        self._engine = EngineSupervisor(config, launch, names, incarnation, where, clock)
        self.cached = CachedKeys()
        """Of its prefix cache."""
        self._doomed: str | None = None
        """Why its process was ended from here, to be started again, unless it was given up."""
        self._given_up = False
        self.heard_s = self._clock()
        """Time of the last message: an engine sends stats several times a second, whatever it does."""

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot, with the counters of earlier processes added."""
        return self._engine.stats

    @property
    def info(self) -> EngineInfo | None:
        """The process's report; None before the first is ready."""
        return self._engine.info

    @property
    def incarnation(self) -> int:
        """Number of processes that had the number before this one."""
        return self._engine.incarnation

    @property
    def failure(self) -> str | None:
        """Why it could not start, or was given up."""
        return self._engine.failure

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
        return self._engine.process.process.pid or 0

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
            self._engine.process.send([_encoder.encode(message), *frames])

    def submit(self, submit: SubmitRequest, prompt: bytes | memoryview) -> None:
        """Give the scheduler a request. The engine's own queue limit does not apply: the cluster has one."""
        # On another host the monotonic clock differs: times leave in the instance's clock.
        received_s = submit.received_s - self._engine.process.ahead_s
        self.tell(msgspec.structs.replace(submit, resubmitted=True, received_s=received_s), prompt)

    def drain(self) -> None:
        """Finish what is there, take nothing new, then end. The state becomes `left`."""
        if self.serves:
            self.tell(EndProcess())
        else:
            self._engine.end()
        if self.state != "failed":
            self.state = "draining"

    def fail(self, why: str) -> None:
        """Give up an instance that cannot be part of this cluster."""
        self._fail(why)
        self._engine.end()

    def restart(self, why: str, for_good: bool) -> None:
        """End the process at once, as if it had been lost. for_good: without starting another one."""
        self._doomed, self._given_up = why, for_good
        self._engine.end()

    def end(self) -> None:
        """End the process, whatever it is doing. Harmless when repeated."""
        if self.state not in ("failed", "left"):
            self.state = "left"
        self._engine.process.end()

    # -- one process after another ----------------------------------------------------------------------------------

    async def look_after(self, listener: InstanceListener) -> None:
        """Run the instance's processes, one after another, until it has left or is given up; report to `listener`."""
        try:
            while True:
                why = await self._engine.watch(partial(self._receive, listener))
                served, leaves = self._engine.process.served, self.state == "draining"
                if self.state == "failed":
                    break
                why, self._doomed = self._doomed or why, None
                self._engine.process.end(at_once=True)
                # The state before the listener: it must not place anything here while it handles the loss.
                self.state = "left" if leaves else "lost"
                self.cached.clear()
                self._engine.clear_gauges()
                if served:
                    listener.lost(self.number, why)
                # Asked again: the listener may have drained the instance while it handled the loss.
                if leaves or self._leaves():
                    self.state = "left"
                    break
                if self._given_up:
                    self._fail(why)
                    break
                if not self._engine.replace(why):
                    self._fail(self._engine.failure or why)
                    break
        except Exception as error:
            log.exception("instance %d cannot be looked after", self.number)
            self._fail(f"it cannot be looked after: {error}")
            self._engine.process.end(at_once=True)
            listener.lost(self.number, str(error))
        listener.ended(self.number)

    def _leaves(self) -> bool:
        """Whether the instance is being drained."""
        return self.state == "draining"

    def _receive(self, listener: InstanceListener, message: Message) -> None:
        """Handle one message of the process; the supervisor has taken in stats, report and error."""
        self.heard_s = self._clock()
        if isinstance(message, IterationOutputs):
            # Before the deltas: what follows from a token is decided by the newest free and cached blocks.
            if message.cache is not None:
                self.cached.take(message.cache)
            if message.stats is not None:
                listener.measured(self.number)
            if message.samples is not None:
                listener.sampled(self.number, message.samples)
            for delta in message.deltas:
                listener.heard(self.number, delta)
        elif isinstance(message, EngineInfo):
            if self.state != "draining":
                self.state = "ready"
            listener.joined(self.number)
        elif isinstance(message, FatalError):
            log.error("instance %d: %s", self.number, message.error)
        else:
            listener.said(self.number, message)

    def _fail(self, why: str) -> None:
        self.state, self._engine.failure = "failed", why
        log.error("instance %d is lost for good: %s", self.number, why)
