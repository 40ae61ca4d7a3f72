"""The engine process's outer loop: messages in, steps, messages out, over one ZeroMQ socket.

With an executor that computes in this process, the socket is drained between iterations and never waited for while
there is work. With one that computes elsewhere, the process sleeps until a message of a client or of the executor
comes. When idle it sleeps in poll(). Messages that arrive meanwhile wait in ZeroMQ's own buffers.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from headway.core.batch import ClockProtocol
from headway.core.errors import UnavailableError
from headway.runtime.cluster.agent import InstanceAgent
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.liveness import HeartbeatSender, IterationProgress
from headway.runtime.engine.protocol import (
    AbortRequest,
    EndProcess,
    EngineInfo,
    FatalError,
    FromInstance,
    IterationOutputs,
    OutputDelta,
    SubmitRequest,
    ToInstance,
    split_endpoints,
)
from headway.runtime.engine.requests import take_changes
from headway.runtime.launcher.processes import guard_client

_STATS_EVERY_S = 0.1
_IDLE_POLL_MS = 500
_STATS_POLL_MS = 50

_decoder = msgspec.msgpack.Decoder(AbortRequest | EndProcess | ToInstance)
_encoder = msgspec.msgpack.Encoder()


class EngineService:
    """The engine process's sockets and loop. Ends after `EndProcess`, or when `is_wanted` is no longer true.

    token: authenticates this process to a server on another host; such a connection is not reopened once it has ended.
    """

    def __init__(
        self, endpoint: str, clock: ClockProtocol, is_wanted: Callable[[], bool], token: str | None = None
    ) -> None:
        self._clock = clock
        self._context = zmq.Context()
        self._token = token
        self._socket = self._open(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        where, self._heartbeat_endpoint = split_endpoints(endpoint)
        self._socket.connect(where)
        self._heartbeats: HeartbeatSender | None = None
        self._core: EngineCore | None = None
        self._is_wanted = is_wanted
        self._disconnected = False
        self._stats_sent_s = 0.0
        self._was_idle = self._was_recovering = self._stats_due_soon = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start_heartbeats(self, every_s: float) -> None:
        """Start to send heartbeats from a thread of their own, so that a long iteration is no silence."""
        self._heartbeats = HeartbeatSender(self._heartbeat_socket, self._progress, every_s)

    def _progress(self) -> bytes:
        """Return a heartbeat's frame. Called in the heartbeats' thread."""
        iteration = None if self._core is None else self._core.iteration
        if iteration is None:
            return IterationProgress().encode()
        return IterationProgress(self._clock.now() - iteration[0], iteration[1]).encode()

    def fail(self, error: str, final: bool = True) -> None:
        """Report that the engine cannot start or go on. final: a restart would not help."""
        self._send(FatalError(error, final))

    def run(self, core: EngineCore, agent: InstanceAgent | None = None) -> None:
        """Announce readiness and serve until drained. agent: set where the engine is an instance of a cluster."""
        self._core, self._agent = core, agent
        self._send(core.info)
        gc.collect()
        # The model lives as long as the process: exempt its objects from garbage collection.
        gc.freeze()
        gc.enable()  # off while the process starts
        self._executor_waits_on, self._poller = core.executor.waits_on, self._make_poller(core)
        while self._server_is_there:
            # With an executor in this process, `turn` itself computes: never sleep while there is work.
            sleeps = (core.idle and not core.draining) or (self._executor_waits_on and not core.idle)
            if sleeps and (agent is None or agent.idle):
                self._poller.poll(_STATS_POLL_MS if self._stats_due_soon else _IDLE_POLL_MS)
            self.turn(True)
            if agent is not None:
                agent.work(self)
            if core.draining and core.idle and (agent is None or agent.idle):
                break

    def turn(self, step: bool, wait_s: float = 0.0) -> None:
        """Receive messages, send results, and, with `step`, run one iteration.

        wait_s: how long to wait for a message where there is nothing to compute. Also called by a span while it is
        computed; UnavailableError ends the span when the server is gone.
        """
        core, agent = self._core, self._agent
        assert core is not None, "run has begun"
        if wait_s and core.idle:
            self._poller.poll(int(1000 * wait_s))
        deltas = list(self._receive(core))
        if step:
            deltas += core.step(0.0 if self._executor_waits_on else None)
        deltas += core.staged
        core.staged.clear()
        # Check the scheduler's invariants at each transition to idle, when it delays no request.
        if core.idle and not self._was_idle:
            core.scheduler.check()
        now = self._clock.now()
        # Also at once when the engine becomes idle, so that gauges do not remain at the last busy values.
        due = now - self._stats_sent_s >= _STATS_EVERY_S or (core.idle and not self._was_idle)
        due = due or core.recovering != self._was_recovering
        self._was_idle, self._was_recovering = core.idle, core.recovering
        # After a restart of workers the executor waits on other sockets.
        if self._executor_waits_on and core.executor.waits_on != self._executor_waits_on:
            self._executor_waits_on, self._poller = core.executor.waits_on, self._make_poller(core)
        if deltas or due:
            stats = core.stats() if due else None
            self._stats_due_soon = self._stats_due_soon and not due
            self._stats_sent_s = now if due else self._stats_sent_s
            samples = core.sampler.take() if due and core.sampler is not None else None
            changes = take_changes(core.scheduler.block_managers[0])
            self._send(IterationOutputs(deltas=tuple(deltas), stats=stats, samples=samples, cache=changes))
        if agent is not None:  # KV that this iteration computed may be sent
            agent.turn(self)
        if not step and not self._server_is_there:
            raise UnavailableError("the server is gone")

    @property
    def _server_is_there(self) -> bool:
        """Whether the server is still there."""
        return not self._disconnected and self._is_wanted()

    def send(self, message: FromInstance, measured: bool = False) -> None:
        """Send a message; measured: after a stats snapshot of the pool as it is now."""
        if measured:
            self._stats_sent_s = self._clock.now()
            assert self._core is not None, "run has begun"
            self._send(IterationOutputs(deltas=(), stats=self._core.stats()))
        self._send(message)

    def wake(self) -> None:
        """Wake the loop from its poll, from any thread: there is something to send."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.stop()
        self._socket.close()
        self._context.term()
        os.close(self._wakeup)

    def _heartbeat_socket(self) -> zmq.Socket[Any]:
        socket = self._open(zmq.PUSH)
        socket.connect(self._heartbeat_endpoint)
        return socket

    def _open(self, kind: int) -> zmq.Socket[Any]:
        socket = self._context.socket(kind)
        if self._token is not None:
            guard_client(socket, self._token)
            # -1: never reconnect. The next send then fails, which ends this process.
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
        return socket

    def _make_poller(self, core: EngineCore) -> zmq.Poller:
        poller = zmq.Poller()
        for readable in (self._socket, self._wakeup, *core.executor.waits_on):
            poller.register(readable, zmq.POLLIN)
        return poller

    def _receive(self, core: EngineCore) -> Iterable[OutputDelta]:
        deltas: list[OutputDelta] = []
        # Reset the wakeup before messages are read, so that a wakeup meanwhile is not lost.
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return deltas
            self._stats_due_soon = True
            message = _decoder.decode(frames[0].buffer)
            delta: OutputDelta | None = None
            if isinstance(message, SubmitRequest) and message.phase != "spans":
                if self._agent is not None:
                    self._agent.submitted(message)
                delta = core.submit(message, memoryview(frames[1].buffer))
            elif isinstance(message, EndProcess):
                core.draining = True
            elif self._agent is not None:
                self._agent.take(message, memoryview(frames[1].buffer) if len(frames) > 1 else None)
            elif isinstance(message, AbortRequest):
                core.abort(message.id)
            if delta is not None:
                deltas.append(delta)

    def _send(self, message: EngineInfo | IterationOutputs | FatalError | FromInstance) -> None:
        try:
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # the queue is unbounded: the connection has ended and is not reopened
            self._disconnected = True
