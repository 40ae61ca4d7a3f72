"""Sets of replicas that answer which member has the shortest queue.

Queue lengths are whole numbers (tokens, or microseconds), so that adding and subtracting is exact. Ties go to the lower
replica.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol


class ArgMin(Protocol):
    """A set of replicas, each with a weight."""

    def update(self, replica: int, weight: int) -> None:
        """Add a replica, or change its weight."""

    def discard(self, replica: int) -> None:
        """Remove a replica; no error if it is no member."""

    def argmin(self) -> int:
        """Return the member with the smallest (weight, replica); -1 if there is none."""


class HeapArgMin:
    """By a heap that drops stale entries when they reach the top: O(log n) a change, amortised O(log n) an answer."""

    __slots__ = ("_count", "_heap", "_key", "_limit")

    def __init__(self, count: int) -> None:
        """`count`: replicas, members or not."""
        self._count = max(1, count)
        self._key = [-1] * count  # valid heap entry of each replica; -1: no member
        self._heap: list[int] = []
        self._limit = 4 * count + 64

    def update(self, replica: int, weight: int) -> None:
        """See `ArgMin`."""
        # one number orders by (weight, replica)
        key = weight * self._count + replica
        self._key[replica] = key
        heap = self._heap
        # the replica's older entries stay in the heap; `_key` tells which one is valid
        heappush(heap, key)
        if len(heap) > self._limit:  # mostly stale entries: rebuild it
            heap[:] = {key for key in self._key if key >= 0}
            heapify(heap)

    def discard(self, replica: int) -> None:
        """See `ArgMin`."""
        self._key[replica] = -1

    def argmin(self) -> int:
        """See `ArgMin`."""
        heap, keys, count = self._heap, self._key, self._count
        while heap:
            replica = heap[0] % count
            if keys[replica] == heap[0]:
                return replica
            heappop(heap)
        return -1


class ScanArgMin:
    """By looking at every replica, as PecSched's own scheduler does (the cost grows with the cluster)."""

    __slots__ = ("_weight",)

    def __init__(self, count: int) -> None:
        self._weight: list[int | None] = [None] * count

    def update(self, replica: int, weight: int) -> None:
        """See `ArgMin`."""
        self._weight[replica] = weight

    def discard(self, replica: int) -> None:
        """See `ArgMin`."""
        self._weight[replica] = None

    def argmin(self) -> int:
        """See `ArgMin`."""
        best, found = -1, 0
        for replica, weight in enumerate(self._weight):
            if weight is not None and (best < 0 or weight < found):
                best, found = replica, weight
        return best
