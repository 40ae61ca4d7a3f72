"""KV on its way to an instance: senders, links, and receive backends as limited resources, with Tetris's handshake.

A piece is what one instance of a group sends. It needs its sender (one piece at a time) and a receive backend of the
target (`backends` at a time). Backends go to requests in order of their first handshake (Tetris §4.2, Fig. 7), until
all pieces that a request has announced are there: no request's later chunks starve behind others' first ones. What is
sent while it is computed cannot be there before its last layer is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Piece:
    """`send_s`: seconds on the wire; `entry`: the span that computes what it carries, if that may still run."""

    __slots__ = ("began_s", "done_s", "entry", "request", "send_s", "source", "target")

    def __init__(self, request: str, source: int, target: int, send_s: float) -> None:
        self.request, self.source, self.target = request, source, target
        self.send_s = send_s
        self.began_s = self.done_s = 0.0
        self.entry: Any = None


class Transfers:
    """All movements of one cluster. `layers`: how finely a transfer overlaps with the computation of what it carries;
    `order`: handshake, or first-come for each piece by itself (to compare with)."""

    def __init__(self, backends: int, layers: int, order: str = "handshake") -> None:
        self._backends = backends
        self._layers = max(1, layers)
        self._handshake = order == "handshake"
        self._free: dict[int, int] = {}
        self._sending: set[int] = set()
        self._waiting: dict[int, list[tuple[float, int, Piece]]] = {}
        self._first: dict[tuple[str, int], float] = {}
        self._left: dict[tuple[str, int], int] = {}
        self._serial = 0

    def add(self, pieces: list[Piece], now: float) -> None:
        """A handshake for these pieces, all of one request and target."""
        for piece in pieces:
            key = (piece.request, piece.target)
            first = self._first.setdefault(key, now)
            self._left[key] = self._left.get(key, 0) + 1
            self._serial += 1
            at = first if self._handshake else now
            heapq.heappush(self._waiting.setdefault(piece.target, []), (at, self._serial, piece))

    def left(self, request: str, target: int) -> int:
        """Pieces announced and not there."""
        return self._left.get((request, target), 0)

    def start(self, now: float, computed_s: Callable[[Piece], float]) -> list[Piece]:
        """Begin what can begin. `computed_s`: when a piece's KV will be wholly computed, as of now."""
        begun: list[Piece] = []
        for target, heap in self._waiting.items():
            skipped = []
            while heap and self._free.get(target, self._backends) > 0:
                item = heapq.heappop(heap)
                piece = item[2]
                if piece.source in self._sending:
                    skipped.append(item)
                    continue
                self._free[target] = self._free.get(target, self._backends) - 1
                self._sending.add(piece.source)
                piece.began_s = now
                piece.done_s = max(now + piece.send_s, computed_s(piece) + piece.send_s / self._layers)
                begun.append(piece)
            for item in skipped:
                heapq.heappush(heap, item)
        return begun

    def finish(self, piece: Piece) -> bool:
        """A piece is there; True when nothing of its request is under way to that target any more."""
        self._free[piece.target] += 1
        self._sending.discard(piece.source)
        key = (piece.request, piece.target)
        self._left[key] -= 1
        if self._left[key]:
            return False
        del self._left[key], self._first[key]
        return True

    def drop(self, request: str) -> None:
        """Forget what has not begun of a request that has ended."""
        for target, heap in self._waiting.items():
            kept = [item for item in heap if item[2].request != request]
            if len(kept) != len(heap):
                gone = len(heap) - len(kept)
                self._left[request, target] = self._left.get((request, target), 0) - gone
                heapq.heapify(kept)
                self._waiting[target] = kept
                if self._left[request, target] <= 0:
                    self._left.pop((request, target), None)
                    self._first.pop((request, target), None)
