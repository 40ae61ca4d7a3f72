"""One way to one incarnation of another end: a ZeroMQ socket for what leaves, and what is expected from there.

A connection ends once and is never repaired: ZeroMQ's own reconnection is off, because it would lose messages without a
word. Its successor has a higher *term* (`peers`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum

import msgspec
import numpy as np
import zmq

from headway.runtime.kv_transfer.peer import PeerAddress, PeerLostError

Buffer = memoryview | bytes | bytearray


class FrameKind(IntEnum):
    HELLO = 0
    """The first of a term; `note` is where the sender is reached."""
    DATA = 1
    PUSH = 2


class FrameHead(msgspec.Struct, frozen=True, array_like=True):
    """Frame header. `life`, `target_life`: incarnations of sender and receiver."""

    source: int
    life: int
    target_life: int
    term: int
    kind: int
    scope: str
    lane: int
    note: bytes


_encode = msgspec.msgpack.Encoder().encode


class ReceiveTicket:
    """Completion handle of a receive from peer `end`."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._why: str | None = None
        self._over = threading.Event()

    def wait(self, look: Callable[[], None] | None = None, every_s: float = 0.02) -> None:
        """Return when the message has arrived; raise PeerLostError when the connection is lost.

        `look` is called every `every_s` seconds meanwhile; what it raises ends the wait.
        """
        while not self._over.wait(None if look is None else every_s):
            if look is not None:
                look()
        if self._why is not None:
            raise PeerLostError(self._why, self._end)

    def finish(self, why: str | None = None) -> None:
        """Complete the operation (None), or fail it with a reason. Later calls are ignored."""
        if not self._over.is_set():
            self._why = why
            self._over.set()


class SendTicket:
    """Completion handle of a send. When it is done, the caller may reuse the buffer."""

    def __init__(self, connection: PeerConnection, tracker: zmq.MessageTracker) -> None:
        self._connection, self._tracker = connection, tracker

    def wait(self, look: Callable[[], None] | None = None, every_s: float = 0.02) -> None:
        """See `ReceiveTicket.wait`."""
        while not self._tracker.done:
            try:
                self._tracker.wait(every_s)
            except zmq.NotDone:
                if look is not None:
                    look()
        if self._connection.ended is not None:  # which frees what has not left, too
            raise PeerLostError(self._connection.ended, self._connection.peer.instance)


PeerTicket = ReceiveTicket | SendTicket
"""The outcome of an operation with another end."""


class PeerConnection:
    """`out`: connected, or about to be. `forgotten`: scopes whose messages are dropped. `lost` is called once, by the
    thread that notices, with the connection and why."""

    def __init__(
        self,
        sender: tuple[int, int],
        peer: PeerAddress,
        term: int,
        out: zmq.Socket[bytes],
        forgotten: Callable[[str], bool],
        lost: Callable[[PeerConnection, str], None],
    ) -> None:
        self.peer, self.term = peer, term
        self.ended: str | None = None
        """Why nothing goes over it any more; None while something may."""
        self.up = False
        """Whether the other end was ever there."""
        self._sender, self._out, self._forgotten, self._lost = sender, out, forgotten, lost
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._wanted: dict[tuple[str, int], deque[tuple[ReceiveTicket, memoryview]]] = {}
        self._came: dict[tuple[str, int], deque[memoryview]] = {}

    @property
    def life(self) -> tuple[int, int]:
        """Incarnation and term: the higher one counts."""
        return self.peer.incarnation, self.term

    def send(self, kind: FrameKind, scope: str, lane: int, note: bytes, body: Buffer) -> PeerTicket:
        """One message, behind those before it. Never waits for the other side."""
        head = FrameHead(*self._sender, *self.life, kind, scope, lane, note)
        with self._sending:
            # What is pushed is the handlers' to drop: they keep account of it.
            why = self.ended if kind == FrameKind.PUSH else self._closed(scope)
            if why is None:
                try:
                    self._out.send(_encode(head), zmq.NOBLOCK | zmq.SNDMORE)
                    return SendTicket(self, self._out.send(body, zmq.NOBLOCK, copy=False, track=True))
                except zmq.Again:  # it could not be connected: the thread that reads is about to be told
                    why = "it cannot be reached"
        ticket = ReceiveTicket(self.peer.instance)
        ticket.finish(why)
        return ticket

    def expect(self, scope: str, lane: int, into: memoryview) -> ReceiveTicket:
        """The next message of a lane of a scope, into `into`, which has its size."""
        ticket, into = ReceiveTicket(self.peer.instance), into.cast("B")
        with self._receiving:
            why, came = self._closed(scope), self._came.get((scope, lane))
            if why is not None:
                ticket.finish(why)
            elif came:
                _fill(ticket, into, came.popleft())
            else:
                self._wanted.setdefault((scope, lane), deque()).append((ticket, into))
        return ticket

    def came(self, scope: str, lane: int, body: memoryview) -> None:
        """A message for `expect`: kept until then."""
        with self._receiving:
            if self._closed(scope) is None:
                if wanted := self._wanted.get((scope, lane)):
                    _fill(*wanted.popleft(), body)
                else:
                    self._came.setdefault((scope, lane), deque()).append(body)

    def forget(self, scope: str, why: str) -> None:
        """End the waits of a scope; no buffer of theirs is written to any more once this has returned."""
        with self._receiving:
            for key in [key for key in self._came if key[0] == scope]:
                del self._came[key]
            for key in [key for key in self._wanted if key[0] == scope]:
                for ticket, _ in self._wanted.pop(key):
                    ticket.finish(why)

    def end(self, why: str) -> None:
        """Close it, and tell all that wait. Harmless when repeated."""
        with self._sending, self._receiving:
            if self.ended is not None:
                return
            self.ended = why
            self._out.close(0)
            for wanted in self._wanted.values():
                for ticket, _ in wanted:
                    ticket.finish(why)
            self._wanted.clear()
            self._came.clear()
        self._lost(self, why)

    def _closed(self, scope: str) -> str | None:
        """Why nothing of a scope goes over it."""
        return f"{scope} was forgotten" if self._forgotten(scope) else self.ended


def _fill(ticket: ReceiveTicket, into: memoryview, body: memoryview) -> None:
    if body.nbytes != into.nbytes:
        ticket.finish(f"{body.nbytes} bytes came for {into.nbytes}")
        return
    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(body, dtype=np.uint8))  # other threads run meanwhile
    ticket.finish()
