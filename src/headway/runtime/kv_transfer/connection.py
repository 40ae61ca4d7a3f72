"""One connection to one incarnation of another instance: frames leave in order, and bodies are read to where they
belong.

A thread reads and a thread writes; neither holds a lock while it waits for the other side. A connection ends once, and
all that waits on it is told.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np

from headway.runtime.kv_transfer.buffered_reader import AHEAD, PIECES, BufferedReader, advance, rest
from headway.runtime.kv_transfer.completion import TransferCompletion
from headway.runtime.kv_transfer.frames import INLINE, FrameHead, FrameKind, head
from headway.runtime.kv_transfer.rank_routes import named
from headway.runtime.kv_transfer.ring_buffer import BufferRange, RingBuffer, RingReader, most
from headway.runtime.kv_transfer.shared_buffer import Memory, SharedBuffer
from headway.runtime.kv_transfer.streams import MessageStreams

SMALL = 8 << 10
"""Bodies below this travel with their heads."""

Buffer = memoryview | bytes | bytearray


class ReceivePlace(NamedTuple):
    """Where the body of a pushed message is read to, in this order, and what is called once it is all there. `write`
    puts a body that is there into its place; without `views` any is read aside first, and then written."""

    views: Sequence[memoryview]
    complete: Callable[[], None]
    write: Callable[[Memory], None] | None = None


Handler = Callable[[int, str, bytes, int], ReceivePlace | None]
"""(source, scope, note, length): called in a reader's thread, as is `complete`; None: the body is dropped. Must not
block. `complete` may still be called just after `forget`; nothing is written to `views` any more then."""


class SendRoom(NamedTuple):
    """Where a body is put together that is to be pushed; `taken`: it is there that the other side reads it."""

    view: Memory
    taken: BufferRange | None = None


class _ReceiveTarget(NamedTuple):
    """Where the body under way goes: see `ReceivePlace`. `aside`: what is written when it is there; `pushed`: a
    handler has
    said where."""

    scope: str
    views: Sequence[memoryview]
    write: Callable[[Memory], None] | None = None
    aside: Memory | None = None
    pushed: bool = False


class _OutgoingFrame(NamedTuple):
    scope: str
    views: list[memoryview]
    ticket: TransferCompletion
    taken: BufferRange | None


class PeerConnection:
    """Made when a peer is met; frames wait until `serve` brings a socket. `forgotten`: scopes whose frames are dropped.

    `lost` is called once, by whatever thread notices, with the connection and why.
    """

    def __init__(
        self,
        instance: int,
        incarnation: int,
        handler: Callable[[], Handler | None],
        forgotten: Callable[[str], bool],
        lost: Callable[[PeerConnection, str], None],
    ) -> None:
        self.instance, self.incarnation = instance, incarnation
        self._handler, self._forgotten, self._lost = handler, forgotten, lost
        self._socket: socket.socket | None = None
        self._out = threading.Condition()
        self._queue: deque[_OutgoingFrame] = deque()
        self._in = threading.Condition(threading.Lock())
        self._filling = False
        self._lanes = MessageStreams(instance)
        self._reads: _ReceiveTarget | None = None
        self._ceased = 0
        """How often a scope has ceased: a place that a handler gave meanwhile is asked for again."""
        self._ended: str | None = None
        self._arena: Memory | None = None
        self._ring = RingBuffer(0)
        self._again: set[Callable[[], None]] = set()
        self._theirs: Memory | None = None
        self._reader = RingReader(0)
        self._scratch = memoryview(bytearray(AHEAD))

    @property
    def ended(self) -> str | None:
        """Why nothing goes over it any more; None while something may."""
        return self._ended

    @property
    def served(self) -> bool:
        """Whether it has ever been up."""
        return self._socket is not None

    @property
    def up(self) -> bool:
        return self._socket is not None and self._ended is None

    # -- what is asked of it ------------------------------------------------------------------------------------------

    def send(
        self, kind: FrameKind, lane: int, scope: str, note: bytes, buffers: Sequence[Buffer]
    ) -> TransferCompletion:
        """One frame. The ticket: its buffers may be changed. What fits in the socket is written at once."""
        views = [view for view in (memoryview(b).cast("B") for b in buffers) if view.nbytes]
        views.insert(0, memoryview(head(kind, lane, scope, note, sum(view.nbytes for view in views))))
        return self._leave(_OutgoingFrame(scope, views, TransferCompletion(self.instance), None))

    def room(self, size: int, again: Callable[[], None]) -> SendRoom | None:
        """Where a body of so many bytes is put together for `push` or `drop`, in an arena that the other side reads if
        there is one. None: there is no room now, and `again` will be called once, in some thread, when to ask again."""
        with self._out:
            if self._ended is None:
                if self._socket is None:
                    self._again.add(again)
                    return None
                if self._arena is not None and SMALL <= size <= most(self._arena.nbytes):
                    taken = self._ring.take(size)
                    if taken is None:
                        self._again.add(again)
                        return None
                    return SendRoom(self._arena[taken.at : taken.at + size], taken)
        return SendRoom(np.empty(size, dtype=np.uint8))

    def push(self, scope: str, note: bytes, room: SendRoom) -> TransferCompletion:
        """One pushed message. The ticket: it has left, and the room's memory may be changed if it is not of an arena
        (that is the other side's now)."""
        if room.taken is None:
            return self.send(FrameKind.PUSH, 0, scope, note, (room.view.data,))
        said = head(FrameKind.PUSH, 0, scope, note, room.view.nbytes, room.taken.at)
        return self._leave(_OutgoingFrame(scope, [memoryview(said)], TransferCompletion(self.instance), room.taken))

    def drop(self, room: SendRoom) -> None:
        """Nothing is pushed from there."""
        if room.taken is not None:
            with self._out:
                self._ring.drop(room.taken)
            self._rouse()

    def _leave(self, leaving: _OutgoingFrame) -> TransferCompletion:
        with self._out:
            why = self._closed(leaving.scope)
            if why is None:
                if leaving.taken is not None:
                    self._ring.leave(leaving.taken)
                # Written in the caller's thread if nothing is queued before it: saves a thread switch per frame.
                if self._socket is not None and not self._queue and self._try(leaving.views):
                    leaving.ticket.finish()
                else:
                    self._queue.append(leaving)
                    self._out.notify()
                return leaving.ticket
            if leaving.taken is not None:
                self._ring.drop(leaving.taken)
        leaving.ticket.finish(why)
        self._rouse()
        return leaving.ticket

    def _rouse(self) -> None:
        """There may be room again."""
        with self._out:
            waiting, self._again = self._again, set()
        for again in waiting:
            again()

    def expect(self, lane: int, scope: str, into: memoryview) -> TransferCompletion:
        """The next message of a lane, into `into`, which has its size."""
        with self._in:
            why = self._closed(scope)
            if why is None:
                return self._lanes.expect(lane, scope, into)
        ticket = TransferCompletion(self.instance)
        ticket.finish(why)
        return ticket

    def forget(self, scope: str, why: str) -> None:
        """Tickets of a scope end; what is to leave stays here, and no place of its is written to any more."""
        with self._in:
            if self._reads is not None and self._reads.scope == scope:
                self._divert()
            self._lanes.forget(scope, why)
        with self._out:
            kept: deque[_OutgoingFrame] = deque()
            for leaving in self._queue:
                if leaving.scope == scope:
                    leaving.ticket.finish(why)
                # The first frame may be half written: cut off, it would garble all that follow it.
                if not kept or leaving.scope != scope:
                    kept.append(leaving)
                elif leaving.taken is not None:
                    self._ring.drop(leaving.taken)
            self._queue = kept
        self._rouse()

    def cease(self, scope: str) -> None:
        """What was pushed of a scope and is being read is written to its place no more once this has returned."""
        with self._in:
            self._ceased += 1
            if self._reads is not None and self._reads.scope == scope and self._reads.pushed:
                self._divert()

    def end(self, why: str) -> None:
        """Close it, and tell all that wait. Harmless when repeated."""
        with self._in, self._out:
            if self._ended is not None:
                return
            self._ended = why
            self._divert()
            self._lanes.clear(why)
            for leaving in self._queue:
                leaving.ticket.finish(why)
            self._queue.clear()
            self._out.notify_all()
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        self._rouse()
        self._lost(self, why)

    def _closed(self, scope: str) -> str | None:
        """Why nothing of a scope goes over it."""
        return f"{scope} was forgotten" if self._forgotten(scope) else self._ended

    # -- its two threads ----------------------------------------------------------------------------------------------

    def serve(self, peer: socket.socket, arena: SharedBuffer | None = None, theirs: Memory | None = None) -> None:
        """Read until the connection ends; the caller's thread is the reader's. The socket is closed. `arena`: it is
        read by the other side; `theirs` is read here."""
        if theirs is not None:
            self._theirs, self._reader = theirs, RingReader(theirs.nbytes)
        with self._out:
            if self._ended is None:
                if arena is not None:
                    self._arena, self._ring = arena.memory, RingBuffer(arena.memory.nbytes)
                self._socket = peer
                self._out.notify_all()
        self._rouse()
        writer = threading.Thread(target=self._write, name=f"to peer {self.instance}", daemon=True)
        writer.start()
        why = f"{named(self.instance)} has closed the connection"
        try:
            if self.up:
                self._read(peer)
        except OSError as error:
            why = f"{named(self.instance)}: {error}"
        finally:
            self.end(why)
            writer.join()
            peer.close()

    def _try(self, views: list[memoryview]) -> bool:
        """Write what goes without waiting; `views` are cut to what is left. Whether nothing is."""
        assert self._socket is not None
        with suppress(OSError):  # it is full, or gone: the reader will know
            advance(views, self._socket.sendmsg(views[:PIECES], (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL))
        return not views

    def _write(self) -> None:
        while True:
            with self._out:
                while not self._queue and self._ended is None:
                    self._out.wait()
                if self._ended is not None:
                    return
                leaving, peer = self._queue[0], self._socket
            assert peer is not None
            try:
                while leaving.views:
                    advance(leaving.views, peer.sendmsg(leaving.views[:PIECES], (), socket.MSG_NOSIGNAL))
            except OSError as error:
                self.end(f"{named(self.instance)}: {error}")
                return
            with self._out:
                if self._queue:  # else it has ended
                    self._queue.popleft()
                leaving.ticket.finish()

    def _read(self, peer: socket.socket) -> None:
        ahead = BufferedReader(peer)
        while (frame := ahead.frame()) is not None:
            if frame.kind == FrameKind.READ:
                self._given_back(frame.at)
                continue
            done = self._place(frame)
            if frame.at != INLINE:
                self._fetch(frame)
            elif not self._body(ahead, frame):
                return
            done()

    def _place(self, frame: FrameHead) -> Callable[[], None]:
        """Say where a body goes (`_reads`; None: nowhere), and what follows it."""
        if frame.kind == FrameKind.PUSH:
            while (found := self._pushed(frame)) is None:
                pass
            return found
        with self._in:
            if self._ended is not None or self._forgotten(frame.scope):
                return _nothing
            begun = self._lanes.begin(frame.lane, frame.scope, frame.length)
            if begun is None:
                return _nothing
            into, there = begun
            self._reads = _ReceiveTarget(frame.scope, [into])
            return lambda: self._filled(there)

    def _pushed(self, frame: FrameHead) -> Callable[[], None] | None:
        """See `_place`; None: a scope has ceased since the handler was asked."""
        handler, ceased = self._handler(), self._ceased
        dropped = handler is None or self._forgotten(frame.scope)
        place = None if dropped or handler is None else handler(self.instance, frame.scope, frame.note, frame.length)
        if place is None:
            return _nothing
        views, aside = [view.cast("B") for view in place.views], None
        if views or place.write is None:
            if (room := sum(view.nbytes for view in views)) != frame.length:
                self.end(f"{frame.length} bytes were pushed for a place of {room}")
                return _nothing
        elif frame.at == INLINE:
            aside = np.empty(frame.length, dtype=np.uint8)
            views = [aside.data]
        # The handler ran without the lock: a place that it gave before a `cease` may belong to others by now.
        with self._in:
            if self._ceased != ceased:
                return None
            if self._ended is None and not self._forgotten(frame.scope):
                self._reads = _ReceiveTarget(frame.scope, views, place.write, aside, True)
        return lambda: self._completed(place.complete)

    def _body(self, ahead: BufferedReader, frame: FrameHead) -> bool:
        """Read a body to where it goes at the time: a scope may be forgotten meanwhile. False: the connection ended."""
        left, done = frame.length, 0
        while left:
            with self._in:
                if self._ended is not None:
                    return False
                views = [self._scratch[:left]] if self._reads is None else rest(self._reads.views, done)
                self._filling = True
            try:
                got = ahead.into(views, left)
            finally:
                with self._in:
                    self._filling = False
                    self._in.notify_all()
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
            said = head(FrameKind.READ, 0, "", b"", 0, self._reader.messages)
            self._leave(_OutgoingFrame("", [memoryview(said)], TransferCompletion(self.instance), None))

    def _given_back(self, messages: int) -> None:
        with self._out:
            try:
                self._ring.read(messages)
            except ValueError as error:
                raise OSError(str(error)) from None
        self._rouse()

    @contextmanager
    def _writing(self) -> Iterator[_ReceiveTarget | None]:
        """Where a body goes; it is not forgotten before this is left."""
        with self._in:
            into, self._filling = self._reads, self._reads is not None
        try:
            yield into
        finally:
            with self._in:
                self._filling = False
                self._in.notify_all()

    def _divert(self) -> None:
        """Discard the rest of the body that is being read; return when no write into its place is under way."""
        self._reads = None
        while self._filling:
            self._in.wait()

    def _completed(self, complete: Callable[[], None]) -> None:
        with self._writing() as into:
            if into is not None and into.write is not None and into.aside is not None:
                into.write(into.aside)
        with self._in:
            there, self._reads = self._reads is not None, None
        if there:
            complete()

    def _filled(self, there: Callable[[], None]) -> None:
        with self._in:
            wanted, self._reads = self._reads is not None, None
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
