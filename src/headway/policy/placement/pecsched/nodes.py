"""Which replicas does a long request get? Inside one node where possible, else as few nodes as can be, and of the
combinations the one with the smallest total queue (PecSched §5, §6.2).

Both classes follow one rule. As long as replicas are missing: want = as many as are missing, but at most what the
fullest node has to give; of the nodes that have `want`, take those replicas of the node where its `want` shortest
queues sum to least. Ties go to the node with the lower number, and inside it to the lower replica.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

_TAKEN = 1 << 50
"""Queue of a replica that cannot be had: more than any queue, and few enough to be summed over a node."""


class NodeSelection(NamedTuple):
    """Replicas in order of (node, replica), and on how many nodes they are."""

    replicas: tuple[int, ...]
    nodes: int


class NodeIndex(Protocol):
    """Replicas that a long request may take, with their queues, by node."""

    def put(self, replica: int, weight: int) -> None:
        """It may be had, with this queue."""

    def give_back(self, replicas: Sequence[int], weights: Sequence[int]) -> None:
        """They may be had again, with these queues; none of them could be before."""

    def take(self, size: int) -> NodeSelection | None:
        """`size` replicas by the rule, which may not be had from now on. None when there are not so many."""


class ScanNodes:
    """By looking at every replica."""

    def __init__(self, node_of: Sequence[int]) -> None:
        """`node_of`: the node of each replica."""
        self._node_of = node_of
        self._weight: list[int | None] = [None] * len(node_of)

    def put(self, replica: int, weight: int) -> None:
        """See Nodes."""
        self._weight[replica] = weight

    def give_back(self, replicas: Sequence[int], weights: Sequence[int]) -> None:
        """See Nodes."""
        for replica, weight in zip(replicas, weights, strict=True):
            self._weight[replica] = weight

    def take(self, size: int) -> NodeSelection | None:
        """See Nodes."""
        nodes: dict[int, list[tuple[int, int]]] = {}
        for replica, weight in enumerate(self._weight):
            if weight is not None:
                nodes.setdefault(self._node_of[replica], []).append((weight, replica))
        if sum(map(len, nodes.values())) < size:
            return None
        chosen: list[tuple[int, int]] = []
        while len(chosen) < size:
            want = min(size - len(chosen), max(map(len, nodes.values())))
            sums = [(sum(w for w, _ in sorted(has)[:want]), node) for node, has in nodes.items() if len(has) >= want]
            node = min(sums)[1]
            chosen += [(node, replica) for _, replica in sorted(nodes.pop(node))[:want]]
        for _, replica in chosen:
            self._weight[replica] = None
        return NodeSelection(tuple(replica for _, replica in sorted(chosen)), len({node for node, _ in chosen}))


class IndexedNodes:
    """A table of sums, one row a node, one column a number of replicas. A row is made anew with every change of a queue
    of its node, so that a question is a look down one column a node that it takes."""

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
        self._place = [row * width + slot[replica] for replica, row in enumerate(self._row)]
        self._all_taken = [_TAKEN] * width
        self._no_sums = array("q", accumulate(self._all_taken))
        self._weights = self._all_taken * len(names)
        self._sums = self._no_sums * len(names)
        table = np.frombuffer(self._sums, dtype=np.int64).reshape(-1, width)
        self._columns = [table[:, column] for column in range(width)]
        self._counts = [0] * len(names)
        self._with_count = [len(names)] + [0] * width
        self._total = 0

    def put(self, replica: int, weight: int) -> None:
        """See Nodes."""
        place, row, width, weights = self._place[replica], self._row[replica], self._width, self._weights
        if weights[place] == _TAKEN:
            self._count(row, 1)
        weights[place] = weight
        low = row * width
        self._sums[low : low + width] = array("q", accumulate(sorted(weights[low : low + width])))

    def give_back(self, replicas: Sequence[int], weights: Sequence[int]) -> None:
        """See Nodes."""
        back: dict[int, int] = {}
        for replica, weight in zip(replicas, weights, strict=True):
            self._weights[self._place[replica]] = weight
            row = self._row[replica]
            back[row] = back.get(row, 0) + 1
        for row, count in back.items():
            self._count(row, count)
            self._renew(row)

    def take(self, size: int) -> NodeSelection | None:
        """See Nodes."""
        if self._total < size:
            return None
        chosen: list[tuple[int, list[int]]] = []
        most, missing = self._width, size
        while missing:
            while not self._with_count[most]:
                most -= 1
            want = min(missing, most)
            row = int(self._columns[want - 1].argmin())
            chosen.append((row, self._take_from(row, want)))
            missing -= want
        chosen.sort()
        return NodeSelection(tuple([replica for _, replicas in chosen for replica in replicas]), len(chosen))

    def _take_from(self, row: int, want: int) -> list[int]:
        """The shortest queues of a node, in order of replica."""
        low, high, members = row * self._width, (row + 1) * self._width, self._members[row]
        weights = self._weights[low:high]
        self._count(row, -want)
        if not self._counts[row]:
            self._weights[low:high] = self._all_taken
            self._sums[low:high] = self._no_sums
            if want == len(members):
                return members
            return [replica for replica, weight in zip(members, weights, strict=False) if weight != _TAKEN]
        taken = sorted([replica for _, replica in sorted(zip(weights, members, strict=False))[:want]])
        for replica in taken:
            self._weights[self._place[replica]] = _TAKEN
        self._renew(row)
        return taken

    def _count(self, row: int, more: int) -> None:
        count = self._counts[row]
        self._with_count[count] -= 1
        self._with_count[count + more] += 1
        self._counts[row] = count + more
        self._total += more

    def _renew(self, row: int) -> None:
        low, high = row * self._width, (row + 1) * self._width
        self._sums[low:high] = array("q", accumulate(sorted(self._weights[low:high])))
