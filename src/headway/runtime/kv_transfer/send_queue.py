"""Sending KV to one end over one connection: copied out of the pool a body at a time, by a thread of its own.

A body is copied when its turn comes and a slab is free, so that memory beside the pool is bounded, or earlier, when its
slots are about to be overwritten. The computing thread never waits for the network.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from headway.runtime.kv_transfer import slab_memory
from headway.runtime.kv_transfer.body_notes import KvBody, MemoryOffer, SlabFree, SliceEnd, encode
from headway.runtime.kv_transfer.connector import Bytes, KvPart, SaveKv
from headway.runtime.kv_transfer.packing import gather
from headway.runtime.kv_transfer.peers import PeerLostError
from headway.runtime.kv_transfer.slab_memory import MemoryKind, SlabMemory

_NO_BODY = memoryview(b"")


class KvPacket:
    """One message of a movement. `part`: where `size` bytes of it lie; None: it is the end. `body`: they had to be
    copied before their turn."""

    __slots__ = ("body", "chosen", "note", "part", "save", "size")

    def __init__(self, save: SaveKv, note: KvBody | SliceEnd, part: KvPart | None = None, chosen: slice = slice(0)):
        self.save, self.note, self.part, self.chosen = save, note, part, chosen
        self.size = 0 if part is None else _token_bytes(part) * (chosen.stop - chosen.start)
        self.body: Bytes | None = None

    def copy(self) -> None:
        """Take it out of the pool, unless that was done."""
        if self.body is None and self.part is not None:
            self.body = self.into(np.empty(self.size, dtype=np.uint8))

    def into(self, slab: Bytes) -> Bytes:
        """Put it together there."""
        view, part = slab[: self.size], self.part
        if self.body is not None:
            np.copyto(view, self.body)
        elif part is not None and isinstance(self.note, KvBody):
            heads = part.cache[self.note.layer, :, part.row : part.row + len(part.heads)]
            gather(heads, part.slots[self.chosen], view)
        return view


def _token_bytes(part: KvPart) -> int:
    return 2 * len(part.heads) * int(part.cache.shape[-1])


def packets_of(save: SaveKv, layer: int, part: KvPart) -> Iterator[KvPacket]:
    """A layer of a movement, as messages that slabs have room for."""
    heads, count = (part.heads.start, part.heads.stop), len(part.positions)
    most = max(1, slab_memory.SLAB_BYTES // _token_bytes(part))
    for at in range(0, count, most):
        chosen = slice(at, min(at + most, count))
        tokens = part.positions[chosen].astype(np.int32).tobytes()
        yield KvPacket(save, KvBody(save.piece, layer, heads, tokens), part, chosen)


class SendLine(Protocol):
    """What a queue needs of a connection (`PeerStream`)."""

    def push(self, to: int, note: bytes, body: memoryview, scope: str) -> object: ...

    def check(self) -> None: ...


class SendQueue:
    """To one end, for as long as `line` is there. `failed(request, why, end)`: see `KvLost`; once for each request of
    which a piece has not been answered."""

    def __init__(
        self, to: int, line: SendLine, kinds: Sequence[MemoryKind], failed: Callable[[str, str, int | None], None]
    ) -> None:
        self.to = to
        self._line, self._kinds, self._failed = line, kinds, failed
        self._gate, self._copying = threading.Condition(), threading.Lock()
        self._queue: deque[KvPacket] = deque()
        self._unanswered: set[SaveKv] = set()
        self._lost: set[SaveKv] = set()
        self._memory = SlabMemory()
        self._free: list[int] = []
        self._taken: bool | None = None
        self._closed, self._why = False, ""

    def start(self) -> None:
        """Begin to send: what the other end says reaches this queue."""
        threading.Thread(target=self._run, name=f"KV to {self.to}", daemon=True).start()

    @property
    def pending(self) -> bool:
        """Whether a piece has not been answered."""
        return bool(self._unanswered)

    @property
    def gone(self) -> str | None:
        """Why the connection has ended; None while it has not."""
        try:
            self._line.check()
        except PeerLostError as error:
            return str(error)
        return None

    def add(self, save: SaveKv, packets: Iterable[KvPacket]) -> None:
        """To leave in order, behind all that were added before."""
        with self._gate:
            if not self._closed:
                self._unanswered.add(save)
                self._queue.extend(packets)
                self._gate.notify_all()
                return
            reported = save in self._lost
            self._lost.add(save)
        if self._why and not reported:
            self._failed(save.request, self._why, self.to)

    def copy(self, request: str) -> None:
        """Copy a request's packets that have not left out of the pool, so that its slots may be overwritten."""
        with self._copying:
            with self._gate:
                waiting = [packet for packet in self._queue if packet.save.request == request]
            for packet in waiting:
                packet.copy()

    def forget(self, request: str) -> None:
        """Drop a request's packets that have not left; its slots are not read once this has returned."""
        with self._copying, self._gate:
            self._queue = deque(packet for packet in self._queue if packet.save.request != request)
            self._unanswered = {save for save in self._unanswered if save.request != request}

    def close(self, why: str = "") -> None:
        """End the thread; nothing more leaves. why: pieces without an answer are lost. Harmless when repeated."""
        with self._copying, self._gate:
            if self._closed:
                return
            self._closed, self._why = True, why
            self._lost, self._unanswered = self._unanswered, set()
            lost = sorted({save.request for save in self._lost})
            self._queue.clear()
            self._gate.notify_all()
        for request in lost if why else ():
            self._failed(request, why, self.to)

    # -- what the other end says --------------------------------------------------------------------------------------

    def answered(self, save: SaveKv) -> None:
        """All of a piece is there."""
        with self._gate:
            self._unanswered.discard(save)

    def freed(self, note: SlabFree) -> None:
        """A slab has been read, or offered memory can be read there or not."""
        with self._gate:
            if note.memory != self._memory.number:
                return
            if note.slab is None:
                self._taken = note.taken
            elif 0 <= note.slab < len(self._memory.slabs) and note.slab not in self._free:
                self._free.append(note.slab)
            self._gate.notify_all()

    # -- the thread that sends ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._agree()
        while (found := self._next()) is not None:
            self._push(*found)
        self._memory.close()

    def _agree(self) -> None:
        """Find memory that the other end can read; without any, bodies travel with their notes."""
        for kind in self._kinds:
            with suppress(OSError):
                memory = kind.make()
                if self._offered(memory):
                    memory.found()
                    break
                memory.close()
        else:
            memory = SlabMemory()
        with self._gate:
            self._memory, self._free = memory, list(range(len(memory.slabs)))

    def _offered(self, memory: SlabMemory) -> bool:
        with self._gate:
            self._memory, self._taken = memory, None
        self._line.push(self.to, encode(MemoryOffer(memory.number, memory.kind, memory.about)), _NO_BODY, "")
        with self._gate:
            self._gate.wait_for(lambda: self._closed or self._taken is not None)
            return bool(self._taken)

    def _next(self) -> tuple[KvPacket, int, Bytes] | None:
        """The next packet, its slab and its body; None at the end."""
        while True:
            with self._gate:
                while not self._closed and not (self._queue and (self._free or not self._queue[0].size)):
                    self._gate.wait()
                if self._closed:
                    return None
                packet = self._queue[0]
                # The one that was read last is in the processor's cache.
                slab = self._free.pop() if packet.size else -1
            # `copy` takes the same lock: before slots are overwritten their packet has either left or been copied.
            with self._copying:
                with self._gate:
                    there = bool(self._queue) and self._queue[0] is packet
                    if there:
                        self._queue.popleft()
                if there:
                    return packet, slab, packet.into(self._memory.slabs[slab])
            self._give_back(slab)  # forgotten between the two locks

    def _push(self, packet: KvPacket, slab: int, body: Bytes) -> None:
        note = packet.note
        if isinstance(note, KvBody):
            note = replace(note, size=packet.size, memory=self._memory.number, slab=slab)
        body = body if not self._memory.kind else body[:0]
        self._line.push(self.to, encode(note), body.data, packet.save.request)

    def _give_back(self, slab: int) -> None:
        if slab >= 0:
            self.freed(SlabFree(self._memory.number, slab))
