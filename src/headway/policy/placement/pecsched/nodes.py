"""Selection of replicas for a long request: inside one node where possible, else on as few nodes as possible, and of
the combinations the one with the smallest total queue (PecSched §5, §6.2).

Both classes follow one rule. As long as replicas are missing: `want` is the number missing, at most the largest number
available in one node; of the nodes with `want` available replicas, the one whose `want` shortest queues have the
smallest sum gives them. Ties go to the node with the lower number, and inside it to the lower replica.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

_TAKEN = 1 << 50
"""Queue of a replica that is not available: above any queue, and small enough to be summed over a node."""


class NodeSelection(NamedTuple):
    """Replicas selected for a long request."""

    replicas: tuple[int, ...]
    """In order of (node, replica)."""
    nodes: int
    """Number of nodes that they are on."""


class NodeIndex(Protocol):
    """Replicas available to long requests, with their queues, by node."""

    def update(self, replica: int, weight: int) -> None:
        """Make a replica available with this queue, or change its queue."""

    def release(self, replicas: Sequence[int], weights: Sequence[int]) -> None:
        """Make replicas available again, with these queues; none of them was."""

    def take(self, size: int) -> NodeSelection | None:
        """Select `size` replicas and make them unavailable; None if fewer are available."""


class ScanNodes:
    """Selection by looking at every replica."""

    def __init__(self, node_of: Sequence[int]) -> None:
        """`node_of`: the node of each replica."""
        self._node_of = node_of
        self._weight: list[int | None] = [None] * len(node_of)

    def update(self, replica: int, weight: int) -> None:
        """See `NodeIndex`."""
        self._weight[replica] = weight

    def release(self, replicas: Sequence[int], weights: Sequence[int]) -> None:
        """See `NodeIndex`."""
        for replica, weight in zip(replicas, weights, strict=True):
            self._weight[replica] = weight

    def take(self, size: int) -> NodeSelection | None:
        """See `NodeIndex`."""
        nodes: dict[int, list[tuple[int, int]]] = {}
        for replica, weight in enumerate(self._weight):
            if weight is not None:
                nodes.setdefault(self._node_of[replica], []).append((weight, replica))
        if sum(map(len, nodes.values())) < size:
            return None
        chosen: list[tuple[int, int]] = []
        while len(chosen) < size:
            # all that is missing from one node if any has so many, else as many as the largest has
            want = min(size - len(chosen), max(map(len, nodes.values())))
            sums = [(sum(w for w, _ in sorted(has)[:want]), node) for node, has in nodes.items() if len(has) >= want]
            node = min(sums)[1]
            chosen += [(node, replica) for _, replica in sorted(nodes.pop(node))[:want]]
        for _, replica in chosen:
            self._weight[replica] = None
        return NodeSelection(tuple(replica for _, replica in sorted(chosen)), len({node for node, _ in chosen}))


class IndexedNodes:
    """Selection by a table of sums: row = node, column k = sum of the node's k + 1 shortest queues. A row is computed
    again with every change of a queue in its node, so that a selection reads one column for each node that it takes."""

    def __init__(self, node_of: Sequence[int]) -> None:
        """`node_of`: the node of each replica."""
        names = sorted(set(node_of))
        at = {name: row for row, name in enumerate(names)}
        self._row = [at[name] for name in node_of]
        self._members: list[list[int]] = [[] for _ in names]
        for replica, row in enumerate(self._row):
            self._members[row].append(replica)
        width = self._width = max(map(len, self._members), default=1)
        slot = {replica: i for members in self._members for i, replica in enumerate(members)}
        # index of each replica in the flat tables below; nodes with fewer replicas have unused slots, always taken
        self._place = [row * width + slot[replica] for replica, row in enumerate(self._row)]
        self._all_taken = [_TAKEN] * width
        self._no_sums = array("q", accumulate(self._all_taken))
        self._weights = self._all_taken * len(names)
        self._sums = self._no_sums * len(names)
        table = np.frombuffer(self._sums, dtype=np.int64).reshape(-1, width)
        # numpy views of the array's memory: rows are overwritten in place, the array is never resized
        self._columns = [table[:, column] for column in range(width)]
        # available replicas of each node; number of nodes with each count; available replicas in all
        self._counts = [0] * len(names)
        self._with_count = [len(names)] + [0] * width
        self._total = 0

    def update(self, replica: int, weight: int) -> None:
        """See `NodeIndex`."""
        place, row, width, weights = self._place[replica], self._row[replica], self._width, self._weights
        if weights[place] == _TAKEN:
            self._change_count(row, 1)
        weights[place] = weight
        low = row * width
        self._sums[low : low + width] = array("q", accumulate(sorted(weights[low : low + width])))

    def release(self, replicas: Sequence[int], weights: Sequence[int]) -> None:
        """See `NodeIndex`."""
        back: dict[int, int] = {}
        for replica, weight in zip(replicas, weights, strict=True):
            self._weights[self._place[replica]] = weight
            row = self._row[replica]
            back[row] = back.get(row, 0) + 1
        for row, count in back.items():
            self._change_count(row, count)
            self._recompute_row(row)

    def take(self, size: int) -> NodeSelection | None:
        """See `NodeIndex`."""
        if self._total < size:
            return None
        chosen: list[tuple[int, list[int]]] = []
        most, missing = self._width, size
        while missing:
            # the largest count only falls while replicas are taken
            while not self._with_count[most]:
                most -= 1
            want = min(missing, most)
            # a node with fewer than `want` has `_TAKEN` in its sum: it is never the minimum here
            row = int(self._columns[want - 1].argmin())
            chosen.append((row, self._take_from(row, want)))
            missing -= want
        chosen.sort()
        return NodeSelection(tuple([replica for _, replicas in chosen for replica in replicas]), len(chosen))

    def _take_from(self, row: int, want: int) -> list[int]:
        """Take the `want` shortest queues of a node; return them in order of replica."""
        low, high, members = row * self._width, (row + 1) * self._width, self._members[row]
        weights = self._weights[low:high]
        self._change_count(row, -want)
        # the whole node was taken: its row needs no sorting
        if not self._counts[row]:
            self._weights[low:high] = self._all_taken
            self._sums[low:high] = self._no_sums
            if want == len(members):
                return members
            return [replica for replica, weight in zip(members, weights, strict=False) if weight != _TAKEN]
        taken = sorted([replica for _, replica in sorted(zip(weights, members, strict=False))[:want]])
        for replica in taken:
            self._weights[self._place[replica]] = _TAKEN
        self._recompute_row(row)
        return taken

    def _change_count(self, row: int, more: int) -> None:
        count = self._counts[row]
        self._with_count[count] -= 1
        self._with_count[count + more] += 1
        self._counts[row] = count + more
        self._total += more

    def _recompute_row(self, row: int) -> None:
        low, high = row * self._width, (row + 1) * self._width
        self._sums[low:high] = array("q", accumulate(sorted(self._weights[low:high])))
