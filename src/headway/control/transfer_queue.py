"""KV on its way to an instance: senders and receive backends as limited resources, with Tetris's handshake.

A piece is what one instance of a group sends. It needs its sender (one piece at a time) and a receive backend of the
target (`backends` at a time). Backends go to requests in order of their first handshake (Tetris §4.2, Fig. 7), until
all pieces that a request has announced are there: no request's later chunks starve behind others' first ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from headway.control.queue_entries import SpanEntry


class KvSlice:
    """The KV of a request's tokens [start, end) that lies on `source`, one of `share` instances that it is spread over.

    entry: the span that computes it, if that may still run. overlapped: all layers but the last one have been sent
    while they were computed. began_s: when it was granted its sender and a backend. over: it is there, or nobody waits
    for it any more. number: in order of announcement. `driver`: whatever the hands keep of it."""

    __slots__ = ("began_s", "driver", "end", "entry", "number", "over", "overlapped", "request", "share", "source",
                 "start", "target")  # fmt: skip

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
        self.request, self.source, self.target = request, source, target
        self.start, self.end, self.share = start, end, share
        self.entry, self.overlapped = entry, overlapped
        self.began_s = 0.0
        self.over = False
        self.number = 0
        self.driver: Any = None


class TransferQueue:
    """All movements of one cluster. `order`: handshake, or first-come for each piece by itself (to compare with)."""

    def __init__(self, backends: int, order: str = "handshake") -> None:
        self._backends = backends
        self._handshake = order == "handshake"
        self._free: dict[int, int] = {}
        self._sending: dict[int, KvSlice] = {}
        self._waiting: dict[int, list[tuple[float, int, KvSlice]]] = {}
        self._first: dict[tuple[str, int], float] = {}
        self._left: dict[tuple[str, int], int] = {}
        self._serial = 0

    def add(self, pieces: list[KvSlice], now: float) -> None:
        """A handshake for these pieces, all of one request and target."""
        for piece in pieces:
            key = (piece.request, piece.target)
            first = self._first.setdefault(key, now)
            self._left[key] = self._left.get(key, 0) + 1
            self._serial += 1
            piece.number = self._serial
            at = first if self._handshake else now
            heapq.heappush(self._waiting.setdefault(piece.target, []), (at, self._serial, piece))

    def left(self, request: str, target: int) -> int:
        """Pieces announced and not there."""
        return self._left.get((request, target), 0)

    def start(self, now: float) -> list[KvSlice]:
        """Grant what can be granted."""
        begun: list[KvSlice] = []
        for target, heap in self._waiting.items():
            skipped = []
            while heap and self._free.get(target, self._backends) > 0:
                item = heapq.heappop(heap)
                piece = item[2]
                if piece.source in self._sending:
                    skipped.append(item)
                    continue
                self._free[target] = self._free.get(target, self._backends) - 1
                self._sending[piece.source] = piece
                piece.began_s = now
                begun.append(piece)
            for item in skipped:
                heapq.heappush(heap, item)
        return begun

    def finish(self, piece: KvSlice) -> bool:
        """A piece is there; True when nothing of its request is under way to that target any more. One that is over
        already is ignored."""
        if piece.over:
            return False
        self._end(piece)
        return self._count((piece.request, piece.target), 1)

    def drop(self, request: str) -> None:
        """Forget what has not been granted of a request that has ended."""
        for target, heap in self._waiting.items():
            kept = [item for item in heap if item[2].request != request]
            if len(kept) != len(heap):
                heapq.heapify(kept)
                gone, self._waiting[target] = len(heap) - len(kept), kept
                self._count((request, target), gone)

    def cancel(self, request: str) -> None:
        """Forget all of a request: what was granted ends now."""
        self.drop(request)
        for piece in [piece for piece in self._sending.values() if piece.request == request]:
            self._end(piece)
            self._count((request, piece.target), 1)

    def lose(self, instance: int) -> None:
        """An instance is gone: what it sends or receives ends now. (What waits is dropped with its requests.)"""
        for piece in [piece for piece in self._sending.values() if instance in (piece.source, piece.target)]:
            self._end(piece)
            self._count((piece.request, piece.target), 1)

    def ends(self, request: str) -> set[int]:
        """Instances that send or receive something of a request, or wait to."""
        return {instance for name, instance in self.all_ends() if name == request}

    def all_ends(self) -> Iterator[tuple[str, int]]:
        """(request, instance) of all that is sent or waits to be, some more than once."""
        waiting = (item[2] for heap in self._waiting.values() for item in heap)
        for piece in (*waiting, *self._sending.values()):
            yield piece.request, piece.source
            yield piece.request, piece.target

    def behind(self) -> dict[str, set[str]]:
        """Of each request that has announced pieces whose senders send others' pieces: whose."""
        found: dict[str, set[str]] = {}
        for heap in self._waiting.values():
            for _, _, piece in heap:
                first = self._sending.get(piece.source)
                if first is not None and first.request != piece.request:
                    found.setdefault(piece.request, set()).add(first.request)
        return found

    def under_way(self) -> list[KvSlice]:
        """Pieces that have been granted and are not over."""
        return list(self._sending.values())

    def _end(self, piece: KvSlice) -> None:
        piece.over = True
        self._free[piece.target] += 1
        del self._sending[piece.source]

    def _count(self, key: tuple[str, int], fewer: int) -> bool:
        """So many pieces are expected no more; True when none is."""
        self._left[key] -= fewer
        if self._left[key]:
            return False
        del self._left[key], self._first[key]
        return True
