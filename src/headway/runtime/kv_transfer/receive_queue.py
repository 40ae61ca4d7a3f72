"""Receiving KV: bodies are written into their reserved slots, each end's by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from headway.kv.slot_ranges import SlotRanges, slot_ranges_of
from headway.runtime.kv_transfer.body_notes import (
    KvBody,
    MemoryOffer,
    Note,
    SlabFree,
    SliceEnd,
)
from headway.runtime.kv_transfer.connector import Bytes, FinishedTransfers, KvLost, KvPlace, KvReceived
from headway.runtime.kv_transfer.packing import by_runs, scatter, spread
from headway.runtime.kv_transfer.peers import PeerLostError, PeerStream
from headway.runtime.kv_transfer.rank_routes import named
from headway.runtime.kv_transfer.slab_memory import MemoryKind, SlabReader

NO_SCOPE = ""
"""Of what ends say about memory: it is never forgotten."""


class _IncomingSlice:
    """A piece of which something has come."""

    __slots__ = ("began_s", "bodies")

    def __init__(self) -> None:
        self.began_s, self.bodies = time.monotonic(), 0


class _RequestPlace:
    """A request's place, and what has not come of it: `missing`, by layer, head and token, and how much that is. What
    comes twice counts once. `gate` is held while slots are written."""

    def __init__(self, place: KvPlace) -> None:
        self.place, self.slots = place, SlotRanges(place.runs)
        self.missing = np.ones((place.cache.shape[0], len(place.heads), place.tokens), dtype=bool)
        self.left = self.missing.size
        self.coming: dict[tuple[int, int], _IncomingSlice] = {}
        self.gate, self.closed = threading.Lock(), False

    def write(self, note: KvBody, body: Bytes) -> None:
        """Put a body into its slots. Raises ValueError where it does not fit."""
        place, positions = self.place, note.positions
        first, stop = note.heads
        if first < place.heads.start or stop > place.heads.stop or first >= stop:
            raise ValueError(f"KV heads {first} to {stop}, where {place.heads.start} to {place.heads.stop} are kept")
        here = len(positions) and positions.min() >= 0 and positions.max() < place.tokens
        if not 0 <= note.layer < len(place.cache) or not here:
            raise ValueError(f"layer {note.layer}, tokens up to {positions.max(initial=-1)} of {place.tokens}")
        rows = slice(first - place.heads.start, stop - place.heads.start)
        heads = place.cache[note.layer, :, rows]
        if body.nbytes != heads.shape[0] * heads.shape[1] * len(positions) * heads.shape[3]:
            raise ValueError(f"{body.nbytes} bytes for {len(positions)} tokens of {stop - first} heads")
        slots = self.slots.of(positions)
        found = slot_ranges_of(slots)
        if by_runs(len(slots), len(found)):
            spread(body, heads, found)
        else:
            scatter(body, heads, slots)
        missing = self.missing[note.layer, rows]
        self.left -= int(missing[:, positions].sum())
        missing[:, positions] = False


class ReceiveQueue:
    """The KV that one instance or rank receives. `wake` is called when there is something to `take`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._gate = threading.Lock()
        self._boxes: dict[str, _RequestPlace] = {}
        self._received: list[KvReceived] = []
        self._lost: list[KvLost] = []

    def open(self, request: str, place: KvPlace) -> None:
        """Keep the KV that arrives for a request from now on."""
        with self._gate:
            self._boxes[request] = _RequestPlace(place)

    def close(self, request: str) -> None:
        """Drop further messages of the request. After return, no thread writes to its slots."""
        with self._gate:
            box = self._boxes.pop(request, None)
        if box is not None:
            with box.gate:
                box.closed = True

    def matched(self, request: str) -> int | None:
        """See `KvConnector.get_num_new_matched_tokens`."""
        with self._gate:
            box = self._boxes.get(request)
        if box is None:
            return None
        whole = int(box.place.cache.shape[0]) * len(box.place.heads)
        # `left` counts (layer, head, token) units; a token with any unit missing is missing: rounded up.
        return box.place.tokens - -(-box.left // whole)

    def lose(self, source: int, why: str) -> None:
        """What one end had begun to send will not be whole."""
        with self._gate:
            boxes = list(self._boxes.items())
        for request, box in boxes:
            with box.gate:
                gone = [key for key in box.coming if key[1] == source]
                for key in gone:
                    del box.coming[key]
            if gone:
                self.fail(request, why, source)

    def fail(self, request: str, why: str, end: int | None = None) -> None:
        """Something of a request cannot be sent or received. See `KvLost`."""
        with self._gate:
            self._lost.append(KvLost(request, why, end))
        self._wake()

    def take(self) -> FinishedTransfers:
        """What has come to its end since the last call."""
        with self._gate:
            found = FinishedTransfers(self._received, self._lost)
            self._received, self._lost = [], []
        return found

    # -- in the threads that write ------------------------------------------------------------------------------------

    def body(self, source: int, request: str, note: KvBody, body: Bytes) -> None:
        """Keep a body, unless the request is not awaited here."""
        with self._gate:
            box = self._boxes.get(request)
        if box is None:
            return
        with box.gate:
            if box.closed:
                return
            coming = box.coming.setdefault((note.piece, source), _IncomingSlice())
            try:
                box.write(note, body)
                coming.bodies += 1
                return
            except ValueError as error:
                why = f"{named(source)} has sent what cannot be kept: {error}"
        self.fail(request, why)

    def end(self, source: int, request: str, note: SliceEnd) -> bool:
        """A piece has no more bodies. Whether all of them are here."""
        with self._gate:
            box = self._boxes.get(request)
        if box is None:
            return False
        with box.gate:
            coming = box.coming.pop((note.piece, source), None) or _IncomingSlice()
            if box.closed:
                return False
        # Fewer than were sent: some went down with a connection, or before there was room for the request.
        if coming.bodies != note.bodies:
            self.fail(request, f"{coming.bodies} of {note.bodies} messages of {named(source)} have come")
            return False
        with self._gate:
            self._received.append(KvReceived(request, note.piece, source, coming.began_s, time.monotonic()))
        self._wake()
        return True


class _AttachedMemory(NamedTuple):
    """The end's memory, of which it told over `line`."""

    number: int
    reader: SlabReader
    line: PeerStream


class SourceReader:
    """The thread that writes what one end has sent, in order. `line`: the present connection to the end; may raise
    PeerLostError. `tell(request, note)` tells it something."""

    def __init__(
        self,
        source: int,
        inbox: ReceiveQueue,
        kinds: Mapping[str, MemoryKind],
        line: Callable[[], PeerStream],
        tell: Callable[[str, Note], None],
    ) -> None:
        self._source, self._inbox, self._kinds, self._line, self._tell = source, inbox, kinds, line, tell
        self._memory: _AttachedMemory | None = None
        self._ends = False
        self._queue: SimpleQueue[tuple[str, Note, memoryview] | str | None] = SimpleQueue()
        self.add = self._queue.put
        """(request, note, body); or why a connection has ended."""
        self._thread = threading.Thread(target=self._run, name=f"KV from {source}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, behind what it writes now."""
        self._ends = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None and not self._ends:
            if isinstance(item, str):
                self._lose(item)
                continue
            request, note, body = item
            if isinstance(note, MemoryOffer):
                self._attach(note)
            elif isinstance(note, SliceEnd):
                if self._inbox.end(self._source, request, note):
                    self._tell(request, replace(note, kept=True))
            elif isinstance(note, KvBody):
                self._keep(request, note, body)
                self._tell(NO_SCOPE, SlabFree(note.memory, note.slab))

    def _attach(self, offer: MemoryOffer) -> None:
        try:
            kind, line = self._kinds.get(offer.kind), self._line()
        except PeerLostError:
            return
        self._detach()
        reader = None if kind is None else kind.attach(offer.about)
        self._memory = None if reader is None else _AttachedMemory(offer.memory, reader, line)
        self._tell(NO_SCOPE, SlabFree(offer.memory, taken=reader is not None))

    def _keep(self, request: str, note: KvBody, body: memoryview) -> None:
        if self._inbox.matched(request) is None:
            return
        if body.nbytes:
            self._inbox.body(self._source, request, note, np.frombuffer(body, dtype=np.uint8))
            return
        memory = self._memory
        try:
            if memory is None or memory.number != note.memory:
                raise OSError("the memory is not known")
            there = memory.reader.read(note.slab, note.size, lambda: self._check(memory.line))
        except (OSError, PeerLostError) as error:
            self._inbox.fail(request, f"what {named(self._source)} has sent cannot be read: {error}", self._source)
            return
        self._inbox.body(self._source, request, note, there)

    def _check(self, line: PeerStream) -> None:
        if self._ends:
            raise PeerLostError("this instance ends")
        line.check()

    def _lose(self, why: str) -> None:
        """A connection has ended, maybe an earlier one than that of the present memory."""
        if self._memory is not None:
            try:
                self._memory.line.check()
            except PeerLostError:
                self._detach()
        self._inbox.lose(self._source, why)

    def _detach(self) -> None:
        if self._memory is not None:
            self._memory.reader.close()
        self._memory = None
