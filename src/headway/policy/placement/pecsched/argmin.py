"""Which of some replicas has the shortest queue? A heap whose old entries are thrown away when they come to the top.

Queue lengths are whole numbers (tokens, or microseconds), so that what was added can be taken off again without a rest.
Ties go to the lower replica.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Protocol


class ArgMin(Protocol):
    """A set of replicas with a weight each."""

    def put(self, replica: int, weight: int) -> None:
        """Add, or change its weight."""

    def drop(self, replica: int) -> None:
        """Remove; no error when it is not there."""

    def least(self) -> int:
        """The member with the smallest (weight, replica); -1 when there is none."""


class HeapArgMin:
    """O(log n) a change, amortised O(log n) a question."""

    __slots__ = ("_count", "_heap", "_key", "_limit")

    def __init__(self, count: int) -> None:
        """`count`: replicas, members or not."""
        self._count = max(1, count)
        self._key = [-1] * count
        self._heap: list[int] = []
        self._limit = 4 * count + 64

    def put(self, replica: int, weight: int) -> None:
        """See Least."""
        key = weight * self._count + replica
        self._key[replica] = key
        heap = self._heap
        heappush(heap, key)
        if len(heap) > self._limit:
            heap[:] = {key for key in self._key if key >= 0}
            heapify(heap)

    def drop(self, replica: int) -> None:
        """See Least."""
        self._key[replica] = -1

    def least(self) -> int:
        """See Least."""
        heap, keys, count = self._heap, self._key, self._count
        while heap:
            replica = heap[0] % count
            if keys[replica] == heap[0]:
                return replica
            heappop(heap)
        return -1


class ScanArgMin:
    """The same by looking at every replica, as PecSched's own scheduler does (its cost grows with the cluster)."""

    __slots__ = ("_weight",)

    def __init__(self, count: int) -> None:
        self._weight: list[int | None] = [None] * count

    def put(self, replica: int, weight: int) -> None:
        """See Least."""
        self._weight[replica] = weight

    def drop(self, replica: int) -> None:
        """See Least."""
        self._weight[replica] = None

    def least(self) -> int:
        """See Least."""
        best, found = -1, 0
        for replica, weight in enumerate(self._weight):
            if weight is not None and (best < 0 or weight < found):
                best, found = replica, weight
        return best
