"""What leaves for one instance: copied out of the pool a packet at a time, and pushed, by a thread of its own.

A packet is copied when its turn comes, so that memory beside the pool is bounded, or earlier, when its slots are about
to be overwritten. Who computes never waits for the network.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from headway.kv.runs import Indices, runs_of
from headway.transfer.connector import Bytes, KvPart, Save
from headway.transfer.notes import Note, encode, packets
from headway.transfer.peers import PeerLostError, Ticket

PACKET_BYTES = 1 << 20
WINDOW_BYTES = 8 << 20
"""How much may have been copied and not have left."""

_FEW = 16
"""Tokens a run below which one gather beats a copy for each run."""


class Way(Protocol):
    """How the bodies of one movement get there: over a socket, or to this instance itself."""

    dead: bool
    """Set once a body has not got there: what follows is of no use."""

    def push(self, note: bytes, body: memoryview) -> Ticket:
        """The ticket: the body has left. It raises PeerLostError where it will not."""


class Packet:
    """One message of a movement. `body` once it has been copied; without `part` it has none."""

    __slots__ = ("body", "chosen", "note", "part", "request", "way")

    def __init__(
        self, request: str, way: Way, note: Note, part: KvPart | None = None, chosen: slice = slice(0)
    ) -> None:
        self.request, self.way, self.note, self.part, self.chosen = request, way, note, part, chosen
        self.body: Bytes | None = None

    def copy(self) -> None:
        """Take it out of the pool, unless that was done."""
        if self.body is None and self.part is not None:
            part = self.part
            heads = part.cache[self.note.layer, :, part.row : part.row + len(part.heads)]
            self.body = gather(heads, part.slots[self.chosen])
            self.part = None


def packets_of(save: Save, way: Way, layer: int, part: KvPart) -> Iterator[Packet]:
    """A layer of a movement, as messages of bounded size."""
    token_bytes = 2 * len(part.heads) * part.cache.shape[-1]
    heads = (part.heads.start, part.heads.stop)
    for chosen, tokens in packets(part.positions, max(1, PACKET_BYTES // token_bytes)):
        yield Packet(save.request, way, Note(save.piece, layer, heads, tokens), part, chosen)


def gather(heads: Bytes, slots: Indices) -> Bytes:
    """(2, heads, slots, vector) of chosen slots, contiguous."""
    found = runs_of(slots)
    if len(slots) < _FEW * len(found):
        return np.ascontiguousarray(heads[:, :, slots])
    body = np.empty((*heads.shape[:2], len(slots), heads.shape[-1]), dtype=np.uint8)
    at = 0
    for first, count in found:
        body[:, :, at : at + count] = heads[:, :, first : first + count]
        at += count
    return body


class Outlet:
    """One destination. `failed(request, why)` is called in its thread."""

    def __init__(self, name: str, failed: Callable[[str, str], None]) -> None:
        self._failed = failed
        self._gate = threading.Condition()
        self._copying = threading.Lock()
        self._queue: deque[Packet] = deque()
        self._closed = False
        self._leaving: deque[tuple[Packet, Ticket, int]] = deque()
        self._bytes = 0
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, packets: Iterable[Packet]) -> None:
        """To leave in order, behind all that were added before."""
        with self._gate:
            self._queue.extend(packets)
            self._gate.notify()

    def copy(self, request: str) -> None:
        """Take what has not left of a request out of the pool."""
        with self._copying:
            with self._gate:
                waiting = [packet for packet in self._queue if packet.request == request]
            for packet in waiting:
                packet.copy()

    def forget(self, request: str) -> None:
        """What has not left of a request stays here, and its slots are read no more."""
        with self._copying, self._gate:
            self._queue = deque(packet for packet in self._queue if packet.request != request)

    def close(self) -> None:
        """End the thread; nothing more leaves."""
        with self._copying, self._gate:
            self._closed = True
            self._queue.clear()
            self._gate.notify()

    def _run(self) -> None:
        while (packet := self._next()) is not None:
            if not packet.way.dead:
                body = memoryview(b"") if packet.body is None else packet.body.reshape(-1).data
                self._leaving.append((packet, packet.way.push(encode(packet.note), body), body.nbytes))
                self._bytes += body.nbytes
            while self._bytes > WINDOW_BYTES or (self._leaving and self._leaving[0][1].done):
                self._left()

    def _next(self) -> Packet | None:
        """The next packet, copied; None at the end."""
        while True:
            with self._gate:
                while not self._queue and not self._closed:
                    self._gate.wait()
                if self._closed:
                    return None
            with self._copying:  # who overwrites slots waits for this copy, and finds the packet gone or copied
                with self._gate:
                    packet = self._queue.popleft() if self._queue else None
                if packet is not None:
                    packet.copy()
                    return packet

    def _left(self) -> None:
        """Wait until the oldest has left."""
        packet, ticket, size = self._leaving.popleft()
        self._bytes -= size
        try:
            ticket.wait()
        except PeerLostError as error:
            if not packet.way.dead:
                packet.way.dead = True
                self._failed(packet.request, str(error))
