"""Sending KV to one instance: copied out of the pool a packet at a time, and pushed, by a thread of its own.

A packet is copied when its turn comes and there is room for it, so that memory beside the pool is bounded, or earlier,
when its slots are about to be overwritten. The computing thread never waits for the network.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from headway.runtime.kv_transfer.body_notes import BodyNote, encode, packets
from headway.runtime.kv_transfer.connector import Bytes, KvPart, SaveKv
from headway.runtime.kv_transfer.packing import gather
from headway.runtime.kv_transfer.peers import PeerLostError, SendRoom, TransferCompletion

PACKET_BYTES = 2 << 20
"""As large as an arena takes: what a packet costs beside its copies is a fifth of them."""
WINDOW_BYTES = 8 << 20
"""How much may have been copied for a socket and not have left. What an arena holds is bounded by its size."""


class TransferRoute(Protocol):
    """How the bodies of one transfer reach their target: another instance, or this instance itself."""

    dead: bool
    """Set once a body has not got there: what follows is of no use."""

    def room(self, size: int, again: Callable[[], None]) -> SendRoom | None:
        """Where a body is put together, for `push` or `drop`. None: nowhere now; `again`: it may be asked again."""

    def push(self, note: bytes, room: SendRoom) -> TransferCompletion:
        """The ticket: the body has left. It raises PeerLostError where it will not."""

    def drop(self, room: SendRoom) -> None:
        """Nothing is pushed from there."""


class KvPacket:
    """One message of a movement, with `size` bytes of body. `body`: they had to be copied before their turn."""

    __slots__ = ("body", "chosen", "note", "part", "request", "size", "way")

    def __init__(
        self, request: str, way: TransferRoute, note: BodyNote, part: KvPart | None = None, chosen: slice = slice(0)
    ) -> None:
        self.request, self.way, self.note, self.part, self.chosen = request, way, note, part, chosen
        tokens = chosen.stop - (chosen.start or 0)
        self.size = 0 if part is None else 2 * len(part.heads) * tokens * int(part.cache.shape[-1])
        self.body: Bytes | None = None

    def copy(self) -> None:
        """Take it out of the pool, unless that was done."""
        if self.body is None:
            self.body = np.empty(self.size, dtype=np.uint8)
            self._gather(self.body)

    def into(self, room: SendRoom) -> SendRoom:
        """Where its body is now: there, or where it was copied to before."""
        if self.body is None:
            self._gather(room.view)
            return room
        if room.taken is None:
            return SendRoom(self.body)
        np.copyto(room.view, self.body)
        return room

    def _gather(self, into: Bytes) -> None:
        if self.part is not None:
            part = self.part
            heads = part.cache[self.note.layer, :, part.row : part.row + len(part.heads)]
            gather(heads, part.slots[self.chosen], into)
            self.part = None


def packets_of(save: SaveKv, way: TransferRoute, layer: int, part: KvPart) -> Iterator[KvPacket]:
    """A layer of a movement, as messages of bounded size."""
    token_bytes = 2 * len(part.heads) * part.cache.shape[-1]
    heads = (part.heads.start, part.heads.stop)
    for chosen, tokens in packets(part.positions, max(1, PACKET_BYTES // token_bytes)):
        yield KvPacket(save.request, way, BodyNote(save.piece, layer, heads, tokens), part, chosen)


class SendQueue:
    """One destination. `failed(request, why, end)` (see `KvLost`) is called in its thread."""

    def __init__(self, name: str, failed: Callable[[str, str, int | None], None]) -> None:
        self._failed = failed
        self._gate = threading.Condition()
        self._copying = threading.Lock()
        self._queue: deque[KvPacket] = deque()
        self._closed = False
        self._leaving: deque[tuple[KvPacket, TransferCompletion, int]] = deque()
        self._bytes = 0
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, packets: Iterable[KvPacket]) -> None:
        """To leave in order, behind all that were added before."""
        with self._gate:
            self._queue.extend(packets)
            self._gate.notify()

    def copy(self, request: str) -> None:
        """Copy a request's packets that have not left out of the pool, so that its slots may be overwritten."""
        with self._copying:
            with self._gate:
                waiting = [packet for packet in self._queue if packet.request == request]
            for packet in waiting:
                packet.copy()

    def forget(self, request: str) -> None:
        """Drop a request's packets that have not left; its slots are not read once this has returned."""
        with self._copying, self._gate:
            self._queue = deque(packet for packet in self._queue if packet.request != request)

    def close(self) -> None:
        """End the thread; nothing more leaves."""
        with self._copying, self._gate:
            self._closed = True
            self._queue.clear()
            self._gate.notify()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            packet, room = found
            if not packet.way.dead:
                size = room.view.nbytes if room.taken is None else 0
                self._leaving.append((packet, packet.way.push(encode(packet.note), room), size))
                self._bytes += size
            else:
                packet.way.drop(room)
            while self._bytes > WINDOW_BYTES or (self._leaving and self._leaving[0][1].done):
                self._left()

    def _next(self) -> tuple[KvPacket, SendRoom] | None:
        """The next packet, and its body; None at the end."""
        while True:
            with self._gate:
                packet, room = self._first()
            if packet is None or room is None:
                return None
            # `copy` takes the same lock: before slots are overwritten their packet has either left or been copied.
            with self._copying:
                with self._gate:
                    there = bool(self._queue) and self._queue[0] is packet
                    if there:
                        self._queue.popleft()
                if there:
                    return packet, packet.into(room)
            # Forgotten between the two locks.
            packet.way.drop(room)

    def _first(self) -> tuple[KvPacket | None, SendRoom | None]:
        """The packet whose turn it is, and room for it, as soon as there are both; none at the end."""
        while not self._closed:
            if self._queue and (room := self._queue[0].way.room(self._queue[0].size, self._again)) is not None:
                return self._queue[0], room
            self._gate.wait()
        return None, None

    def _again(self) -> None:
        with self._gate:
            self._gate.notify()

    def _left(self) -> None:
        """Wait until the oldest has left."""
        packet, ticket, size = self._leaving.popleft()
        self._bytes -= size
        try:
            ticket.wait()
        except PeerLostError as error:
            if not packet.way.dead:
                packet.way.dead = True
                self._failed(packet.request, str(error), error.end)
