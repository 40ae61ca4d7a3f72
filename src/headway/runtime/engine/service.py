"""The engine process's outer loop: messages in, steps, messages out, over one ZeroMQ socket.

An executor that computes in this process: while there is work, the socket is drained between iterations and never
waited for. One that computes elsewhere: the process sleeps until a client or the executor has something to say. When
idle it sleeps in poll(). Messages that arrive meanwhile wait in ZeroMQ's own buffers.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from headway.core.clock import ClockProtocol
from headway.core.errors import UnavailableError
from headway.runtime.cluster.instance_agent import InstanceAgent
from headway.runtime.cluster.messages import FromInstance, ToInstance
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import (
    AbortRequest,
    DrainEngine,
    EngineInfo,
    FatalError,
    IterationOutputs,
    OutputDelta,
    SubmitRequest,
    split_endpoints,
)
from headway.runtime.launcher.heartbeat import HeartbeatSender
from headway.runtime.launcher.secret import guard_client

_STATS_EVERY_S = 0.1
_IDLE_POLL_MS = 500
_TOLD_SOON_MS = 50

_decoder = msgspec.msgpack.Decoder(SubmitRequest | AbortRequest | DrainEngine | ToInstance)
_encoder = msgspec.msgpack.Encoder()


class EngineService:
    """Speaks for one engine at `endpoint` until told to drain, or until `parent`, the process that started this one,
    is gone. (Who the parent is must be told: it may have died before this process could ask.) token: what a server on
    another host takes this process by; a connection to it that ends is not made again."""

    def __init__(self, endpoint: str, clock: ClockProtocol, parent: int, token: str | None = None) -> None:
        self._clock = clock
        self._context = zmq.Context()
        self._token = token
        self._socket = self._open(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        where, self._beats_at = split_endpoints(endpoint)
        self._socket.connect(where)
        self._heart: HeartbeatSender | None = None
        self._parent = parent
        self._cut = False
        self._stats_sent_s = 0.0
        self._was_idle = self._was_recovering = self._untold = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def live(self, every_s: float) -> None:
        """Begin to send beats, from a thread of their own: a long iteration is no silence."""
        self._heart = HeartbeatSender(self._beats, b"", every_s)

    def fail(self, error: str, final: bool = True) -> None:
        """The engine cannot start, or go on (`final` false: a new one might)."""
        self._send(FatalError(error, final))

    def run(self, core: EngineCore, member: InstanceAgent | None = None) -> None:
        """Announce readiness and serve until drained. member: what makes the engine an instance of a cluster."""
        self._core, self._member = core, member
        self._send(core.info)
        gc.collect()
        gc.freeze()  # the model is here to stay: collections need not walk it
        self._elsewhere, self._poller = core.executor.waits_on, self._listen(core)
        while self._wanted:
            sleeps = (core.idle and not core.draining) or (self._elsewhere and not core.idle)
            if sleeps and (member is None or member.idle):
                self._poller.poll(_TOLD_SOON_MS if self._untold else _IDLE_POLL_MS)
            self.turn(True)
            if member is not None:
                member.work(self)
            if core.draining and core.idle and (member is None or member.idle):
                break

    def turn(self, step: bool, wait_s: float = 0.0) -> None:
        """Take in messages and tell what there is; step: and one iteration. wait_s: wait so long for a message where
        there is nothing to compute. What a run calls while it is under way: UnavailableError ends it when the server is
        gone."""
        core, member = self._core, self._member
        if wait_s and core.idle:
            self._poller.poll(int(1000 * wait_s))
        deltas = list(self._receive(core))
        if step:
            deltas += core.step(0.0 if self._elsewhere else None)
        if core.idle and not self._was_idle:
            core.scheduler.check()
        now = self._clock.now()
        due = now - self._stats_sent_s >= _STATS_EVERY_S or (core.idle and not self._was_idle)
        due = due or core.recovering != self._was_recovering
        self._was_idle, self._was_recovering = core.idle, core.recovering
        if self._elsewhere and core.executor.waits_on != self._elsewhere:
            self._elsewhere, self._poller = core.executor.waits_on, self._listen(core)
        if deltas or due:
            stats = core.stats() if due else None
            self._untold = self._untold and not due
            self._stats_sent_s = now if due else self._stats_sent_s
            self._send(IterationOutputs(deltas=tuple(deltas), stats=stats))
        for staged in core.staged:
            self._send(staged)
        core.staged.clear()
        if member is not None:  # what this iteration has computed may go
            member.turn(self)
        if not step and not self._wanted:
            raise UnavailableError("the server is gone")

    @property
    def _wanted(self) -> bool:
        """Whether there is somebody for whom to compute."""
        return os.getppid() == self._parent and not self._cut

    def say(self, message: FromInstance, measured: bool = False) -> None:
        """See `member.Loop`."""
        if measured:
            self._stats_sent_s = self._clock.now()
            self._send(IterationOutputs(deltas=(), stats=self._core.stats()))
        self._send(message)

    def ring(self) -> None:
        """From any thread: there is something to tell, so a loop that sleeps is to take a turn."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        if self._heart is not None:
            self._heart.stop()
        self._socket.close()
        self._context.term()
        os.close(self._bell)

    def _beats(self) -> zmq.Socket[Any]:
        socket = self._open(zmq.PUSH)
        socket.connect(self._beats_at)
        return socket

    def _open(self, kind: int) -> zmq.Socket[Any]:
        socket = self._context.socket(kind)
        if self._token is not None:
            guard_client(socket, self._token)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
        return socket

    def _listen(self, core: EngineCore) -> zmq.Poller:
        poller = zmq.Poller()
        for readable in (self._socket, self._bell, *core.executor.waits_on):
            poller.register(readable, zmq.POLLIN)
        return poller

    def _receive(self, core: EngineCore) -> Iterable[OutputDelta]:
        deltas: list[OutputDelta] = []
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return deltas
            self._untold = True
            message = _decoder.decode(frames[0].buffer)
            delta: OutputDelta | None = None
            if isinstance(message, SubmitRequest):
                if self._member is not None:
                    self._member.submitted(message)
                delta = core.submit(message, memoryview(frames[1].buffer))
            elif isinstance(message, AbortRequest):
                core.abort(message.id)
            elif isinstance(message, DrainEngine):
                core.draining = True
            elif self._member is not None:
                self._member.take(message, memoryview(frames[1].buffer) if len(frames) > 1 else None)
            if delta is not None:
                deltas.append(delta)

    def _send(self, message: EngineInfo | IterationOutputs | FatalError | FromInstance) -> None:
        try:
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # there is no limit to what waits here: the connection has ended, and none follows
            self._cut = True
