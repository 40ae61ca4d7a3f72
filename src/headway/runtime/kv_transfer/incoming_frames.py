"""The reading half of a connection: bodies are read to where they belong, or dropped."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from headway.runtime.kv_transfer.buffered_reader import AHEAD, BufferedReader, rest
from headway.runtime.kv_transfer.completion import TransferCompletion
from headway.runtime.kv_transfer.frames import INLINE, FrameHead, FrameKind
from headway.runtime.kv_transfer.ring_buffer import RingReader, most
from headway.runtime.kv_transfer.shared_buffer import Memory
from headway.runtime.kv_transfer.streams import MessageStreams


class ReceivePlace(NamedTuple):
    """Where the body of a pushed message is read to, in this order, and what is called once it is all there. `write`
    puts a body that is there into its place; without `views` any is read aside first, and then written."""

    views: Sequence[memoryview]
    complete: Callable[[], None]
    write: Callable[[Memory], None] | None = None


Handler = Callable[[int, str, bytes, int], ReceivePlace | None]
"""(source, scope, note, length): called in a reader's thread, as is `complete`; None: the body is dropped. Must not
block. `complete` may still be called just after `forget`; nothing is written to `views` any more then."""


class _ReceiveTarget(NamedTuple):
    """Where the body under way goes: see `ReceivePlace`."""

    scope: str
    views: Sequence[memoryview]
    write: Callable[[Memory], None] | None = None
    aside: Memory | None = None
    """What is written when it is there."""
    pushed: bool = False
    """A handler has given the place."""


class ConnectionEnd(NamedTuple):
    """What the reading half asks of its connection."""

    handler: Callable[[], Handler | None]
    closed: Callable[[str], str | None]
    """Returns why nothing of a scope goes over it; None while something may."""
    ended: Callable[[], bool]
    end: Callable[[str], None]
    given_back: Callable[[int], None]
    """Called with the number of messages that the other side has read out of the arena here."""
    give_back: Callable[[int], None]
    """Called with the number of messages that were read out of the other side's arena."""


class IncomingFrames:
    """What is expected over one connection, and the reader's work. `lock` is held for short times only."""

    def __init__(self, instance: int, connection: ConnectionEnd) -> None:
        self._instance, self._connection = instance, connection
        self.lock = threading.Condition(threading.Lock())
        self._filling = False
        self._streams = MessageStreams(instance)
        self._target: _ReceiveTarget | None = None
        self._ceased = 0
        """How often a scope has ceased: a place that a handler gave meanwhile is asked for again."""
        self._theirs: Memory | None = None
        self._reader = RingReader(0)
        self._scratch = memoryview(bytearray(AHEAD))

    def open_arena(self, theirs: Memory) -> None:
        """Read bodies that the other side leaves in an arena, from now on."""
        self._theirs, self._reader = theirs, RingReader(theirs.nbytes)

    def close_arena(self) -> None:
        """Let go of the other side's arena. Called by the reader's thread, when it reads no more."""
        self._theirs = None

    def expect(self, lane: int, scope: str, into: memoryview) -> TransferCompletion:
        """See `PeerConnection.expect`."""
        with self.lock:
            why = self._connection.closed(scope)
            if why is None:
                return self._streams.expect(lane, scope, into)
        ticket = TransferCompletion(self._instance)
        ticket.finish(why)
        return ticket

    def forget(self, scope: str, why: str) -> None:
        """End the tickets of a scope; no place of its is written to any more once this has returned."""
        with self.lock:
            if self._target is not None and self._target.scope == scope:
                self._divert()
            self._streams.forget(scope, why)

    def cease(self, scope: str) -> None:
        """What was pushed of a scope and is being read is written to its place no more once this has returned."""
        with self.lock:
            self._ceased += 1
            if self._target is not None and self._target.scope == scope and self._target.pushed:
                self._divert()

    def stop(self, why: str) -> None:
        """End all tickets. Called with `lock` held, when the connection has ended."""
        self._divert()
        self._streams.clear(why)

    def read(self, peer: socket.socket) -> None:
        """Read until the connection ends. Raises OSError."""
        ahead = BufferedReader(peer)
        while (frame := ahead.frame()) is not None:
            if frame.kind == FrameKind.READ:
                self._connection.given_back(frame.at)
                continue
            done = self._place(frame)
            if frame.at != INLINE:
                self._fetch(frame)
            elif not self._body(ahead, frame):
                return
            done()

    def _place(self, frame: FrameHead) -> Callable[[], None]:
        """Say where a body goes (`_target`; None: nowhere), and what follows it."""
        if frame.kind == FrameKind.PUSH:
            while (found := self._pushed(frame)) is None:
                pass
            return found
        with self.lock:
            if self._connection.closed(frame.scope) is not None:
                return _nothing
            begun = self._streams.begin(frame.lane, frame.scope, frame.length)
            if begun is None:
                return _nothing
            into, there = begun
            self._target = _ReceiveTarget(frame.scope, [into])
            return lambda: self._filled(there)

    def _pushed(self, frame: FrameHead) -> Callable[[], None] | None:
        """See `_place`; None: a scope has ceased since the handler was asked."""
        handler, ceased = self._connection.handler(), self._ceased
        dropped = handler is None or self._connection.closed(frame.scope) is not None
        place = None if dropped or handler is None else handler(self._instance, frame.scope, frame.note, frame.length)
        if place is None:
            return _nothing
        views, aside = [view.cast("B") for view in place.views], None
        if views or place.write is None:
            if (room := sum(view.nbytes for view in views)) != frame.length:
                self._connection.end(f"{frame.length} bytes were pushed for a place of {room}")
                return _nothing
        elif frame.at == INLINE:
            aside = np.empty(frame.length, dtype=np.uint8)
            views = [aside.data]
        # The handler ran without the lock: a place that it gave before a `cease` may belong to others by now.
        with self.lock:
            if self._ceased != ceased:
                return None
            if self._connection.closed(frame.scope) is None:
                self._target = _ReceiveTarget(frame.scope, views, place.write, aside, True)
        return lambda: self._completed(place.complete)

    def _body(self, ahead: BufferedReader, frame: FrameHead) -> bool:
        """Read a body to where it goes at the time: a scope may be forgotten meanwhile. False: the connection ended."""
        left, done = frame.length, 0
        while left:
            with self.lock:
                if self._connection.ended():
                    return False
                views = [self._scratch[:left]] if self._target is None else rest(self._target.views, done)
                self._filling = True
            try:
                got = ahead.into(views, left)
            finally:
                with self.lock:
                    self._filling = False
                    self.lock.notify_all()
            if got < 0:
                ahead.sleep()
            elif got == 0:
                return False
            left, done = left - max(got, 0), done + max(got, 0)
        return True

    def _fetch(self, frame: FrameHead) -> None:
        """Copy a body out of the other side's arena to where it goes."""
        theirs, end = self._theirs, frame.at + frame.length
        if theirs is None or frame.at < 0 or frame.length > most(theirs.nbytes) or end > theirs.nbytes:
            raise OSError(f"{frame.length} bytes at {frame.at} are in no arena")
        with self._writing() as into:
            if into is not None and into.write is not None:
                into.write(theirs[frame.at : end])
            elif into is not None:
                _copy(theirs[frame.at : end], into.views)
        if self._reader.read(frame.length):
            self._connection.give_back(self._reader.messages)

    @contextmanager
    def _writing(self) -> Iterator[_ReceiveTarget | None]:
        """Where a body goes; it is not forgotten before this is left."""
        with self.lock:
            into, self._filling = self._target, self._target is not None
        try:
            yield into
        finally:
            with self.lock:
                self._filling = False
                self.lock.notify_all()

    def _divert(self) -> None:
        """Discard the rest of the body that is being read; return when no write into its place is under way."""
        self._target = None
        while self._filling:
            self.lock.wait()

    def _completed(self, complete: Callable[[], None]) -> None:
        with self._writing() as into:
            if into is not None and into.write is not None and into.aside is not None:
                into.write(into.aside)
        with self.lock:
            there, self._target = self._target is not None, None
        if there:
            complete()

    def _filled(self, there: Callable[[], None]) -> None:
        with self.lock:
            wanted, self._target = self._target is not None, None
            if wanted:
                there()


def _nothing() -> None:
    """What follows a body that was dropped."""


def _copy(source: Memory, views: Sequence[memoryview]) -> None:
    """Fill buffers one after another; other threads run meanwhile."""
    at = 0
    for view in views:
        np.copyto(np.frombuffer(view, dtype=np.uint8), source[at : at + view.nbytes])
        at += view.nbytes
