"""The server's end of the connection to one engine process: messages and heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from headway.runtime.cluster.messages import FromInstance
from headway.runtime.engine.protocol import EngineInfo, FatalError, IterationOutputs
from headway.runtime.launcher.heartbeat import HeartbeatMonitor

START_TIMEOUT_S = 120.0
"""An engine that sends no heartbeat for so long while it starts counts as hung."""

_decoder = msgspec.msgpack.Decoder(EngineInfo | IterationOutputs | FatalError | FromInstance)


class EngineChannel:
    """The server's sockets to one engine process: messages both ways, and its heartbeats.

    timeout_s: how long an engine that has started may be silent; `limit_s`: how long it may be silent now. bind: called
    with the message and the heartbeat socket; its errors are passed on.
    """

    def __init__(self, timeout_s: float, bind: Callable[[zmq.Socket[Any], zmq.Socket[Any]], None]) -> None:
        self._timeout_s = timeout_s
        self.limit_s = START_TIMEOUT_S
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
            self._heartbeats = HeartbeatMonitor([0], self.limit_s, time.monotonic())

    def ready(self) -> None:
        """Apply the shorter time-out of a started engine from now on."""
        self.limit_s = self._timeout_s
        # A running monitor keeps its time of the last heartbeat and only gets the shorter limit.
        if self._heartbeats is not None:
            self._heartbeats.timeout_s = self.limit_s

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

    def is_silent(self, now: float) -> bool:
        """Whether heartbeats are overdue. Before `started`, silence counts from the first heartbeat."""
        # Empty the socket: only the arrival of the newest heartbeat counts.
        while True:
            try:
                self._beats.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if self._heartbeats is None:
                self._heartbeats = HeartbeatMonitor([0], self.limit_s, now)
            self._heartbeats.record_beat(0, now)
        return self._heartbeats is not None and self._heartbeats.silent(now) is not None

    def close(self) -> None:
        """Close the sockets. May be called repeatedly."""
        for socket in (self._socket, self._beats):
            socket.close()
        self._context.destroy(linger=0)


def _seen(sent: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a failed send, so that asyncio does not log it: the loss is detected elsewhere."""
    if not sent.cancelled():
        sent.exception()
