"""Expected messages of one peer, in order by scope and stream: waiting receivers, and messages that came before one.

Not locked: `connection.Connection` calls it under a lock of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from headway.runtime.kv_transfer.completion import TransferCompletion


class _ArrivedMessage:
    """A message that has come, or is being read.

    `ticket` and `into` are those of its receiver, once there is one; without `into` it is read in place.
    """

    __slots__ = ("body", "into", "there", "ticket")

    def __init__(self, length: int, ticket: TransferCompletion | None = None) -> None:
        self.body = bytearray(length)
        self.there = False
        self.ticket = ticket
        self.into: memoryview | None = None

    def deliver(self) -> None:
        """It is there, and expected: put it where it is to go."""
        assert self.ticket is not None
        if self.into is not None and len(self.body) != self.into.nbytes:
            self.ticket.finish(f"{len(self.body)} bytes came for {self.into.nbytes}")
            return
        if self.into is not None:
            self.into[:] = self.body
        self.ticket.finish()


class _StreamState:
    __slots__ = ("came", "wanted")

    def __init__(self) -> None:
        self.wanted: deque[tuple[TransferCompletion, memoryview]] = deque()
        self.came: deque[_ArrivedMessage] = deque()

    def close(self, why: str) -> None:
        """Fail all waiting receivers."""
        for ticket, _ in self.wanted:
            ticket.finish(why)
        for one in self.came:
            if one.ticket is not None:
                one.ticket.finish(why)


class MessageStreams:
    """The streams of one connection, to `end`."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._lanes: dict[tuple[str, int], _StreamState] = {}

    def expect(self, number: int, scope: str, into: memoryview) -> TransferCompletion:
        """See `PeerConnection.expect`."""
        ticket, into = TransferCompletion(self._end), into.cast("B")
        lane = self._lanes.setdefault((scope, number), _StreamState())
        one = next((one for one in lane.came if one.ticket is None), None)
        if one is None:
            lane.wanted.append((ticket, into))
            return ticket
        one.ticket, one.into = ticket, into
        if one.there:
            lane.came.remove(one)
            one.deliver()
        return ticket

    def begin(self, number: int, scope: str, length: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Begin a message of `length` bytes: return the buffer to read it into, and what to call when it is complete.

        None: its receiver expects another size, and was failed.
        """
        lane = self._lanes.setdefault((scope, number), _StreamState())
        # No receiver yet: read aside, and copied to the receiver's buffer by `expect`.
        if not lane.wanted:
            one = _ArrivedMessage(length)
            into = memoryview(one.body)
        else:
            ticket, into = lane.wanted.popleft()
            if into.nbytes != length:
                ticket.finish(f"{length} bytes came for {into.nbytes}")
                return None
            one = _ArrivedMessage(0, ticket)
        lane.came.append(one)
        return into, partial(_is_there, lane, one)

    def forget(self, scope: str, why: str) -> None:
        """Drop a scope, and fail its waiting receivers."""
        for key in [key for key in self._lanes if key[0] == scope]:
            self._lanes.pop(key).close(why)

    def clear(self, why: str) -> None:
        """Drop everything."""
        for lane in self._lanes.values():
            lane.close(why)
        self._lanes.clear()


def _is_there(lane: _StreamState, one: _ArrivedMessage) -> None:
    one.there = True
    if one.ticket is not None:
        lane.came.remove(one)
        one.deliver()
