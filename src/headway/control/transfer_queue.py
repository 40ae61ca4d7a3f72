"""KV transfers between instances: senders and receive backends as limited resources, with Tetris's handshake.

A slice is what one instance of a group sends. It needs its sender (one slice at a time) and a receive backend of the
target (`receive_backends` at a time). Backends go to requests in order of their first handshake (Tetris §4.2, Fig. 7),
until all chunks of a request have arrived: a request's later chunks do not starve behind others' first ones, also where
a chunk is announced after all earlier ones have arrived. The paper "reserves" backends; here a request keeps its rank,
and a backend that it leaves idle between two chunks serves others meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

from headway.control.queue_entries import SpanEntry


class KvSlice:
    """The KV of a request's tokens [start, end) that lies on `source`, to be sent to `target`."""

    __slots__ = (
        "backend_state",
        "began_s",
        "end",
        "ended",
        "entry",
        "number",
        "overlapped",
        "request",
        "share",
        "source",
        "start",
        "target",
    )  # fmt: skip

    def __init__(
        self,
        request: str,
        source: int,
        target: int,
        start: int = 0,
        end: int = 0,
        share: int = 1,
        entry: SpanEntry | None = None,
        overlapped: bool = False,
    ) -> None:
        # request id; ids of the sending and the receiving instance
        self.request, self.source, self.target = request, source, target
        # share: number of instances that the tokens' KV is spread over; each sends one slice
        self.start, self.end, self.share = start, end, share
        # entry: the span that computes the KV, if it may still run. overlapped: all layers but the last one
        # have been sent while they were computed
        self.entry, self.overlapped = entry, overlapped
        # when it was granted its sender and a receive backend
        self.began_s = 0.0
        # it has arrived, or its transfer was cancelled
        self.ended = False
        # 1, 2, … in order of announcement; names the slice in logs
        self.number = 0
        # the backend's own state of it
        self.backend_state: Any = None


class TransferQueue:
    """All KV transfers of one cluster, announced and granted. It has no clock: times are the callers'."""

    def __init__(self, receive_backends: int, order: str = "handshake") -> None:
        """receive_backends: slices that an instance receives at a time. order: "handshake" ranks a slice by its
        request's first announcement to the target, any other value by its own (a baseline)."""
        self._receive_backends = receive_backends
        self._handshake = order == "handshake"
        # receive backends that are free, by target; missing: all
        self._free: dict[int, int] = {}
        # the slice that each sender sends, by source
        self._sending: dict[int, KvSlice] = {}
        # heap for each target of (time of the ranking announcement, number, slice)
        self._waiting: dict[int, list[tuple[float, int, KvSlice]]] = {}
        # slices that were set aside, by target and request: see `parks`
        self._parked: dict[int, dict[str, list[tuple[float, int, KvSlice]]]] = {}
        self.parks = False
        """Whether slices that are not ready are set aside until `unpark`. While some are, `start` asks about one of
        them per target, so that the backend grants blocks that were freed."""
        # time of the first announcement, by (request, target), until the request's last slice has arrived or it ends
        self._first: dict[tuple[str, int], float] = {}
        # slices announced and not arrived, by (request, target); never 0
        self._left: dict[tuple[str, int], int] = {}
        self._serial = 0

    def add(self, kv_slices: list[KvSlice], now: float) -> None:
        """Announce slices, all of one request and target, at time `now` in seconds."""
        for kv_slice in kv_slices:
            key = (kv_slice.request, kv_slice.target)
            first = self._first.setdefault(key, now)
            self._left[key] = self._left.get(key, 0) + 1
            self._serial += 1
            kv_slice.number = self._serial
            at = first if self._handshake else now
            heapq.heappush(self._waiting.setdefault(kv_slice.target, []), (at, self._serial, kv_slice))

    def left(self, request: str, target: int) -> int:
        """Return the number of a request's slices that are announced to a target and have not arrived."""
        return self._left.get((request, target), 0)

    def start(self, now: float, ready: Callable[[KvSlice], bool] = lambda kv_slice: True) -> list[KvSlice]:
        """Grant senders and receive backends to waiting slices, and return the slices to send now.

        ready: whether a slice has all else that it needs. A slice that waits for blocks holds neither sender nor
        backend: what it waits for may be freed by others' slices.
        """
        begun: list[KvSlice] = []
        for target, heap in self._waiting.items():
            skipped = []
            parked = self._parked.setdefault(target, {}) if self.parks else {}
            if parked and self._free.get(target, self._receive_backends) > 0:
                ready(next(iter(parked.values()))[0][2])
            while heap and self._free.get(target, self._receive_backends) > 0:
                item = heapq.heappop(heap)
                kv_slice = item[2]
                # a slice that cannot go yet must not block the target for slices of other senders
                if kv_slice.source in self._sending:
                    skipped.append(item)
                    continue
                if not ready(kv_slice):
                    (parked.setdefault(kv_slice.request, []) if self.parks else skipped).append(item)
                    continue
                self._free[target] = self._free.get(target, self._receive_backends) - 1
                self._sending[kv_slice.source] = kv_slice
                kv_slice.began_s = now
                begun.append(kv_slice)
            # put back with their old rank
            for item in skipped:
                heapq.heappush(heap, item)
        return begun

    def unpark(self, request: str, target: int) -> None:
        """Let a request's slices that were set aside wait again: the target has blocks for them (see `parks`)."""
        for item in self._parked.get(target, {}).pop(request, ()):
            heapq.heappush(self._waiting[target], item)

    def finish(self, kv_slice: KvSlice, more: bool = False) -> bool:
        """Free the sender and backend of a slice that has arrived. Return whether it was the last announced one of its
        request to that target. more: the request will announce further ones, so it keeps its rank. No effect, and
        False, if its transfer has ended already."""
        if kv_slice.ended:
            return False
        self._end(kv_slice)
        return self._count((kv_slice.request, kv_slice.target), 1, more)

    def drop(self, request: str) -> None:
        """Withdraw the slices of an ended request that have not been granted, and its ranks."""
        for target in self._parked:
            self.unpark(request, target)
        for target, heap in self._waiting.items():
            if (request, target) not in self._left:
                continue
            kept = [item for item in heap if item[2].request != request]
            if len(kept) != len(heap):
                heapq.heapify(kept)
                gone, self._waiting[target] = len(heap) - len(kept), kept
                self._count((request, target), gone)
        for key in [key for key in self._first if key[0] == request and key not in self._left]:
            del self._first[key]

    def cancel(self, request: str) -> None:
        """Withdraw all slices of a request; transfers under way end now, without `finish`."""
        self.drop(request)
        for kv_slice in [kv_slice for kv_slice in self._sending.values() if kv_slice.request == request]:
            self._end(kv_slice)
            self._count((request, kv_slice.target), 1)

    def lose(self, instance: int) -> None:
        """End the transfers under way from and to a lost instance. Waiting slices are dropped with their requests."""
        for kv_slice in [
            kv_slice for kv_slice in self._sending.values() if instance in (kv_slice.source, kv_slice.target)
        ]:
            self._end(kv_slice)
            self._count((kv_slice.request, kv_slice.target), 1)

    def ends(self, request: str) -> set[int]:
        """Return the instances at the ends of a request's slices, waiting or under way."""
        return {instance for name, instance in self.all_ends() if name == request}

    def all_ends(self) -> Iterator[tuple[str, int]]:
        """Yield (request, instance) for both ends of every slice, waiting or under way; pairs may repeat."""
        waiting = (item[2] for heap in self._waiting.values() for item in heap)
        parked = (item[2] for each in self._parked.values() for items in each.values() for item in items)
        for kv_slice in (*waiting, *parked, *self._sending.values()):
            yield kv_slice.request, kv_slice.source
            yield kv_slice.request, kv_slice.target

    def under_way(self) -> list[KvSlice]:
        """Return the slices that have been granted and have not ended."""
        return list(self._sending.values())

    def _end(self, kv_slice: KvSlice) -> None:
        kv_slice.ended = True
        self._free[kv_slice.target] += 1
        del self._sending[kv_slice.source]

    def _count(self, key: tuple[str, int], fewer: int, more: bool = False) -> bool:
        """Subtract slices that are no longer expected; return whether none is left. more: others will be announced."""
        self._left[key] -= fewer
        if self._left[key]:
            return False
        del self._left[key]
        if not more:
            # a later announcement of the request to this target ranks as a new first handshake
            del self._first[key]
        return True
