"""The engine process's outer loop: messages in, steps, messages out, over one ZeroMQ socket.

An executor that computes in this process: while there is work, the socket is drained between iterations and never
waited for. One that computes elsewhere: the process sleeps until a client or the executor has something to say. When
idle it sleeps in poll(). Messages that arrive meanwhile wait in ZeroMQ's own buffers.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

from headway.core.clock import Clock
from headway.engine.core import EngineCore
from headway.engine.protocol import BEATS, Abort, Delta, Drain, EngineInfo, Fatal, Outputs, Submit
from headway.parallel.beats import Heart

_STATS_EVERY_S = 0.1
_IDLE_POLL_MS = 500

_decoder = msgspec.msgpack.Decoder(Submit | Abort | Drain)
_encoder = msgspec.msgpack.Encoder()


class EngineService:
    """Speaks for one engine at `endpoint` until told to drain, or until `parent`, the process that started this one,
    is gone. (Who the parent is must be told: it may have died before this process could ask.)"""

    def __init__(self, endpoint: str, clock: Clock, parent: int) -> None:
        self._clock = clock
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)
        self._endpoint = endpoint
        self._heart: Heart | None = None
        self._parent = parent
        self._stats_sent_s = 0.0

    def live(self, every_s: float) -> None:
        """Begin to send beats, from a thread of their own: a long iteration is no silence."""
        self._heart = Heart(self._beats, b"", every_s)

    def fail(self, error: str, final: bool = True) -> None:
        """The engine cannot start, or go on (`final` false: a new one might)."""
        self._send(Fatal(error, final))

    def run(self, core: EngineCore) -> None:
        """Announce readiness and serve until drained."""
        self._send(core.info)
        gc.collect()
        gc.freeze()  # the model is here to stay: collections need not walk it
        was_idle = was_recovering = False
        elsewhere, poller = core.executor.waits_on, self._poller(core)
        while os.getppid() == self._parent:
            if (core.idle and not core.draining) or (elsewhere and not core.idle):
                poller.poll(_IDLE_POLL_MS)
            refused = self._receive(core)
            deltas = [*refused, *core.step(0.0 if elsewhere else None)]
            if core.idle and not was_idle:
                core.scheduler.check()
            now = self._clock.now()
            due = now - self._stats_sent_s >= _STATS_EVERY_S or (core.idle and not was_idle)
            due = due or core.recovering != was_recovering
            was_idle, was_recovering = core.idle, core.recovering
            if elsewhere and core.executor.waits_on != elsewhere:
                elsewhere, poller = core.executor.waits_on, self._poller(core)
            if deltas or due:
                stats = core.stats() if due else None
                self._stats_sent_s = now if due else self._stats_sent_s
                self._send(Outputs(deltas=tuple(deltas), stats=stats))
            if core.draining and core.idle:
                break

    def close(self) -> None:
        if self._heart is not None:
            self._heart.stop()
        self._socket.close()
        self._context.term()

    def _beats(self) -> zmq.Socket[Any]:
        socket = self._context.socket(zmq.PUSH)
        socket.connect(self._endpoint + BEATS)
        return socket

    def _poller(self, core: EngineCore) -> zmq.Poller:
        poller = zmq.Poller()
        for readable in (self._socket, *core.executor.waits_on):
            poller.register(readable, zmq.POLLIN)
        return poller

    def _receive(self, core: EngineCore) -> Iterable[Delta]:
        deltas: list[Delta] = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return deltas
            message = _decoder.decode(frames[0].buffer)
            delta: Delta | None = None
            if isinstance(message, Submit):
                delta = core.submit(message, memoryview(frames[1].buffer))
            elif isinstance(message, Abort):
                core.abort(message.id)
            else:
                core.draining = True
            if delta is not None:
                deltas.append(delta)

    def _send(self, message: EngineInfo | Outputs | Fatal) -> None:
        self._socket.send(_encoder.encode(message))
