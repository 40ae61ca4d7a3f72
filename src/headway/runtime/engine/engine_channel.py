"""The server's end of the connection to one engine process: messages and heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from headway.runtime.engine.instance_protocol import FromInstance
from headway.runtime.engine.iteration_deadline import IterationDeadline, IterationProgress
from headway.runtime.engine.protocol import EngineInfo, FatalError, IterationOutputs
from headway.runtime.launcher.heartbeat import HeartbeatMonitor

START_TIMEOUT_S = 120.0
"""An engine that sends no heartbeat for so long while it starts counts as hung."""

_decoder = msgspec.msgpack.Decoder(EngineInfo | IterationOutputs | FatalError | FromInstance)


class EngineChannel:
    """The server's sockets to one engine process: messages both ways, and its heartbeats.

    timeout_s: how long an engine that has started may send no heartbeat. deadline: how long one iteration may take.
    bind: called with the message and the heartbeat socket; its errors are passed on.
    """

    def __init__(
        self,
        timeout_s: float,
        bind: Callable[[zmq.Socket[Any], zmq.Socket[Any]], None],
        deadline: IterationDeadline | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._progress = IterationProgress()
        self._limit_s = START_TIMEOUT_S
        self._heartbeats: HeartbeatMonitor | None = None
        self._context = zmq.asyncio.Context()
        # Heartbeats are polled synchronously, on the same context.
        self._plain: zmq.Context[Any] = zmq.Context.shadow(self._context.underlying)
        self._socket = self._context.socket(zmq.PAIR)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        self._beats = self._plain.socket(zmq.PULL)
        self._was_there = self._disconnected = False
        try:
            bind(self._socket, self._beats)
        except BaseException:
            self.close()
            raise

    def send(self, frames: Sequence[Any]) -> None:
        """Send one message without blocking. Messages that an engine has not read when it ends are lost."""
        if not self._socket.closed:
            sent = cast("asyncio.Future[Any]", self._socket.send_multipart(frames, copy=False))
            sent.add_done_callback(_seen)

    async def receive(self) -> EngineInfo | IterationOutputs | FatalError | FromInstance:
        """Return the next message."""
        frame = await self._socket.recv()
        self._was_there = True
        message: EngineInfo | IterationOutputs | FatalError | FromInstance = _decoder.decode(frame)
        return message

    def started(self) -> None:
        """Begin to count silence, even if no heartbeat ever comes."""
        if self._heartbeats is None:
            self._heartbeats = HeartbeatMonitor([0], self._limit_s, time.monotonic())

    def ready(self) -> None:
        """Apply the shorter time-out of a started engine from now on."""
        self._limit_s = self._timeout_s
        # A running monitor keeps its time of the last heartbeat and only gets the shorter limit.
        if self._heartbeats is not None:
            self._heartbeats.timeout_s = self._limit_s

    @property
    def disconnected(self) -> bool:
        """Whether an established connection has ended. Messages in transit may be lost, and it is not reopened.

        A PAIR socket with an unbounded queue can send exactly while its authenticated peer is connected; connections
        that fail authentication change nothing.
        """
        if not self._disconnected and not self._socket.closed:
            there = bool(cast("int", self._socket.get(zmq.EVENTS)) & zmq.POLLOUT)
            self._disconnected = self._was_there and not there
            self._was_there |= there
        return self._disconnected

    @property
    def drained(self) -> bool:
        """Whether the connection has ended and all that came over it has been received."""
        return self.disconnected and not cast("int", self._socket.get(zmq.EVENTS)) & zmq.POLLIN

    def hang(self, now: float) -> str | None:
        """Return why the engine counts as hung, as the predicate of a sentence; None: it does not.

        Heartbeats are overdue (before `started`, silence counts from the first one), or say that one iteration takes
        longer than its deadline.
        """
        # Empty the socket: only the arrival of the newest heartbeat counts.
        while True:
            try:
                self._progress = IterationProgress.decode(self._beats.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            if self._heartbeats is None:
                self._heartbeats = HeartbeatMonitor([0], self._limit_s, now)
            self._heartbeats.record_beat(0, now)
        if self._heartbeats is not None and self._heartbeats.silent(now) is not None:
            return f"sent no heartbeat for {self._limit_s:g} s: it hangs"
        progress = self._progress
        if self._deadline is not None and self._deadline.missed(progress):
            predicted = f"{progress.predicted_s:.3g} s were predicted"
            return f"has computed one iteration for {progress.ran_s:.1f} s, where {predicted}: it hangs"
        return None

    def close(self) -> None:
        """Close the sockets. May be called repeatedly."""
        for socket in (self._socket, self._beats):
            socket.close()
        self._context.destroy(linger=0)


def _seen(sent: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a failed send, so that asyncio does not log it: the loss is detected elsewhere."""
    if not sent.cancelled():
        sent.exception()
