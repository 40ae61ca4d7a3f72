"""Receiving KV: bodies are written into their reserved slots, each end's by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from headway.kv.slot_ranges import SlotRanges, slot_ranges_of
from headway.runtime.kv_transfer.body_notes import KvBody, SliceEnd, lengthen
from headway.runtime.kv_transfer.connector import Bytes, FinishedTransfers, KvLost, KvPlace, KvReceived
from headway.runtime.kv_transfer.packing import by_runs, scatter, spread
from headway.runtime.kv_transfer.rank_routes import named


class _IncomingSlice:
    """A piece of which something has come."""

    __slots__ = ("began_s", "bodies")

    def __init__(self) -> None:
        self.began_s, self.bodies = time.monotonic(), 0


class _RequestPlace:
    """A request's place and what has come of it. `left`: layers, heads and tokens that have not, multiplied. `gate` is
    held while slots are written."""

    def __init__(self, place: KvPlace) -> None:
        self.place, self.slots = place, SlotRanges(place.runs)
        self.left = int(place.cache.shape[0]) * len(place.heads) * place.tokens
        self.coming: dict[tuple[int, int], _IncomingSlice] = {}
        self.gate, self.closed = threading.Lock(), False

    def write(self, note: KvBody, body: Bytes) -> int:
        """Put a body into its slots; of how much it was (see `left`). Raises ValueError where it does not fit."""
        place, positions = self.place, lengthen(note.tokens)
        first, stop = note.heads
        if first < place.heads.start or stop > place.heads.stop or first >= stop:
            raise ValueError(f"KV heads {first} to {stop}, where {place.heads.start} to {place.heads.stop} are kept")
        here = len(positions) and positions.min() >= 0 and positions.max() < place.tokens
        if not 0 <= note.layer < len(place.cache) or not here:
            raise ValueError(f"layer {note.layer}, tokens up to {positions.max(initial=-1)} of {place.tokens}")
        heads = place.cache[note.layer, :, first - place.heads.start : stop - place.heads.start]
        if body.nbytes != heads.shape[0] * heads.shape[1] * len(positions) * heads.shape[3]:
            raise ValueError(f"{body.nbytes} bytes for {len(positions)} tokens of {stop - first} heads")
        slots = self.slots.of(positions)
        found = slot_ranges_of(slots)
        if by_runs(len(slots), len(found)):
            spread(body, heads, found)
        else:
            scatter(body, heads, slots)
        return (stop - first) * len(positions)


class ReceiveQueue:
    """The KV that one instance or rank receives. `wake` is called when there is something to `take`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._gate = threading.Lock()
        self._boxes: dict[str, _RequestPlace] = {}
        self._received: list[KvReceived] = []
        self._lost: list[KvLost] = []

    def open(self, request: str, place: KvPlace) -> None:
        """From now on what comes of a request is kept."""
        with self._gate:
            self._boxes[request] = _RequestPlace(place)

    def close(self, request: str) -> None:
        """What still comes is dropped; nothing is written any more once this has returned."""
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
                box.left -= box.write(note, body)
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
