"""Receiving KV: pushed messages are written straight into their reserved slots, by the thread that reads the socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from headway.kv.slot_ranges import SlotRanges, slot_ranges_of
from headway.runtime.kv_transfer.body_notes import END, BodyNote, lengthen
from headway.runtime.kv_transfer.connector import KvLost, KvPlace, KvReceived
from headway.runtime.kv_transfer.packing import by_runs, scatter, spread
from headway.runtime.kv_transfer.peers import ReceivePlace
from headway.runtime.kv_transfer.rank_routes import named

_VIEWS = 64
"""Places in memory above which a body that comes through a socket is read aside, and then spread."""


class _IncomingSlice:
    """A piece of which something has come."""

    __slots__ = ("began_s", "messages")

    def __init__(self, began_s: float) -> None:
        self.began_s, self.messages = began_s, 0


class _RequestPlace:
    """A request's place and what has come of it. `left`: layers, heads and tokens that have not, multiplied."""

    def __init__(self, place: KvPlace) -> None:
        self.place = place
        self.slots = SlotRanges(place.runs)
        self.left = int(place.cache.shape[0]) * len(place.heads) * place.tokens
        self.coming: dict[tuple[int, int], _IncomingSlice] = {}


class ReceiveQueue:
    """The KV that one instance or rank receives.

    In the thread that reads, `wake` is called when there is something to `take`, and `answer(source, request, piece)`
    when a piece is whole.
    """

    def __init__(self, wake: Callable[[], None], answer: Callable[[int, str, int], None]) -> None:
        self._wake, self._answer = wake, answer
        self._gate = threading.Lock()
        self._boxes: dict[str, _RequestPlace] = {}
        self._received: list[KvReceived] = []
        self._lost: list[KvLost] = []

    def open(self, request: str, place: KvPlace) -> None:
        """From now on what comes of a request is kept."""
        with self._gate:
            self._boxes[request] = _RequestPlace(place)

    def close(self, request: str) -> None:
        """What still comes is dropped, but for a body that is being read: `PeerNetwork.forget` ends that."""
        with self._gate:
            self._boxes.pop(request, None)

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
        """What one instance had begun to send will not be whole."""
        with self._gate:
            for request, box in self._boxes.items():
                if any(sender == source for _, sender in box.coming):
                    self._lost.append(KvLost(request, why, source))
        self._wake()

    def fail(self, request: str, why: str, end: int | None = None) -> None:
        """Something of a request cannot be sent or received. See `KvLost`."""
        with self._gate:
            self._lost.append(KvLost(request, why, end))
        self._wake()

    def take(self) -> tuple[list[KvReceived], list[KvLost]]:
        """What has come to its end since the last call."""
        with self._gate:
            received, self._received = self._received, []
            lost, self._lost = self._lost, []
        return received, lost

    # -- in the thread that reads -------------------------------------------------------------------------------------

    def handle(self, source: int, request: str, note: BodyNote, length: int) -> ReceivePlace | None:
        """Return the place of a message's body; None: the request is not awaited here. See `peers.Handler`."""
        now = time.monotonic()
        with self._gate:
            box = self._boxes.get(request)
            if box is None:
                return None
            try:
                return self._place(box, source, request, note, length, now)
            except ValueError as error:
                self._lost.append(KvLost(request, f"{named(source)} has sent what cannot be kept: {error}"))
        self._wake()
        return None

    def _place(
        self, box: _RequestPlace, source: int, request: str, note: BodyNote, length: int, now: float
    ) -> ReceivePlace:
        coming = box.coming.setdefault((note.piece, source), _IncomingSlice(now))
        if note.layer == END:
            return ReceivePlace((), lambda: self._end(box, source, request, note))
        place, positions = box.place, lengthen(note.tokens)
        first, stop = note.heads
        if first < place.heads.start or stop > place.heads.stop or first >= stop:
            raise ValueError(f"KV heads {first} to {stop}, where {place.heads.start} to {place.heads.stop} are kept")
        here = len(positions) and positions.min() >= 0 and positions.max() < place.tokens
        if not 0 <= note.layer < len(place.cache) or not here:
            raise ValueError(f"layer {note.layer}, tokens up to {positions.max(initial=-1)} of {place.tokens}")
        heads = place.cache[note.layer, :, first - place.heads.start : stop - place.heads.start]
        if length != heads.shape[0] * heads.shape[1] * len(positions) * heads.shape[3]:
            raise ValueError(f"{length} bytes for {len(positions)} tokens of {stop - first} heads")
        units = (stop - first) * len(positions)

        def count() -> None:
            coming.messages += 1
            box.left -= units

        slots = box.slots.of(positions)
        found = slot_ranges_of(slots)
        complete = self._counted(request, box, count)
        if not by_runs(len(slots), len(found)):
            return ReceivePlace((), complete, lambda body: scatter(body, heads, slots))
        views: list[memoryview] = []
        if 2 * (stop - first) * len(found) <= _VIEWS:
            views = [
                heads[at][slot : slot + size].reshape(-1).data
                for at in np.ndindex(2, stop - first)
                for slot, size in found
            ]
        return ReceivePlace(views, complete, lambda body: spread(body, heads, found))

    def _counted(self, request: str, box: _RequestPlace, then: Callable[[], None]) -> Callable[[], None]:
        """`then`, unless the request was forgotten meanwhile: its slots may be others' now."""

        def complete() -> None:
            with self._gate:
                if self._boxes.get(request) is box:
                    then()

        return complete

    def _end(self, box: _RequestPlace, source: int, request: str, note: BodyNote) -> None:
        with self._gate:
            if self._boxes.get(request) is not box:
                return
            coming = box.coming.pop((note.piece, source))
            # The end note has the number of messages before it: fewer means that some went down with a connection.
            if coming.messages == note.heads[0]:
                self._received.append(KvReceived(request, note.piece, source, coming.began_s, time.monotonic()))
                self._answer(source, request, note.piece)
            else:
                why = f"{coming.messages} of {note.heads[0]} messages of {named(source)} have come"
                self._lost.append(KvLost(request, why))
        self._wake()
