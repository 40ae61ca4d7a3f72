"""One connection to one incarnation of another instance: frames leave in order, and bodies are read to where they
belong.

A thread reads and a thread writes; neither holds a lock while it waits for the other side. A connection ends once, and
all that waits on it is told.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from headway.runtime.kv_transfer.buffered_reader import PIECES, advance
from headway.runtime.kv_transfer.completion import TransferCompletion
from headway.runtime.kv_transfer.frames import FrameKind, head
from headway.runtime.kv_transfer.incoming_frames import ConnectionEnd, Handler, IncomingFrames
from headway.runtime.kv_transfer.rank_routes import named
from headway.runtime.kv_transfer.ring_buffer import BufferRange, RingBuffer, most
from headway.runtime.kv_transfer.shared_buffer import Memory, SharedBuffer

SMALL = 8 << 10
"""Bodies below this travel with their heads."""

Buffer = memoryview | bytes | bytearray


class SendRoom(NamedTuple):
    """Where a body is put together that is to be pushed; `taken`: it is there that the other side reads it."""

    view: Memory
    taken: BufferRange | None = None


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
        self._forgotten, self._lost = forgotten, lost
        self._socket: socket.socket | None = None
        self._out = threading.Condition()
        self._queue: deque[_OutgoingFrame] = deque()
        self._ended: str | None = None
        end = ConnectionEnd(
            handler, self._closed, lambda: self._ended is not None, self.end, self._given_back, self._give_back
        )
        self._incoming = IncomingFrames(instance, end)
        self._arena: Memory | None = None
        self._ring = RingBuffer(0)
        self._again: set[Callable[[], None]] = set()

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
        return self._incoming.expect(lane, scope, into)

    def forget(self, scope: str, why: str) -> None:
        """Tickets of a scope end; what is to leave stays here, and no place of its is written to any more."""
        self._incoming.forget(scope, why)
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
        self._incoming.cease(scope)

    def end(self, why: str) -> None:
        """Close it, and tell all that wait. Harmless when repeated."""
        with self._incoming.lock, self._out:
            if self._ended is not None:
                return
            self._ended = why
            self._incoming.stop(why)
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
            self._incoming.open_arena(theirs)
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
                self._incoming.read(peer)
        except OSError as error:
            why = f"{named(self.instance)}: {error}"
        finally:
            self.end(why)
            writer.join()
            peer.close()
            # both halves refer to each other, so that only the garbage collector would free these
            with self._out:
                self._arena = None
            self._incoming.close_arena()

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

    def _given_back(self, messages: int) -> None:
        with self._out:
            try:
                self._ring.read(messages)
            except ValueError as error:
                raise OSError(str(error)) from None
        self._rouse()

    def _give_back(self, messages: int) -> None:
        said = head(FrameKind.READ, 0, "", b"", 0, messages)
        self._leave(_OutgoingFrame("", [memoryview(said)], TransferCompletion(self.instance), None))
