"""Which replicas does a long request get? Inside one node where possible, else as few nodes as can be, and of the
combinations the one with the smallest total queue (PecSched §5, §6.2).

Both classes follow one rule. As long as replicas are missing: want = as many as are missing, but at most what the
fullest node has to give; of the nodes that have `want`, take those replicas of the node where its `want` shortest
queues sum to least. Ties go to the node with the lower number, and inside it to the lower replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

_TOGETHER = 32
_TAKEN = 1 << 50
"""Queue of a replica that cannot be had: more than any queue, and few enough to be summed over a node."""


class Nodes(Protocol):
    """Replicas that a long request may take, with their queues, by node."""

    def put(self, replica: int, weight: int) -> None:
        """It may be had, with this queue."""

    def put_all(self, replicas: Sequence[int], weights: Sequence[int]) -> None:
        """They may be had again; none of them could be before."""

    def drop(self, replicas: Sequence[int]) -> None:
        """They may not be had; all of them could be before."""

    def group(self, size: int) -> tuple[int, ...] | None:
        """`size` replicas by the rule, in order of (node, replica); None when there are not so many. Changes nothing:
        the caller drops what it takes."""


class ScanNodes:
    """By looking at every replica."""

    def __init__(self, node_of: Sequence[int]) -> None:
        """`node_of`: the node of each replica."""
        self._node_of = node_of
        self._weight: list[int | None] = [None] * len(node_of)

    def put(self, replica: int, weight: int) -> None:
        """See Nodes."""
        self._weight[replica] = weight

    def put_all(self, replicas: Sequence[int], weights: Sequence[int]) -> None:
        """See Nodes."""
        for replica, weight in zip(replicas, weights, strict=True):
            self._weight[replica] = weight

    def drop(self, replicas: Sequence[int]) -> None:
        """See Nodes."""
        for replica in replicas:
            self._weight[replica] = None

    def group(self, size: int) -> tuple[int, ...] | None:
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
        return tuple(replica for _, replica in sorted(chosen))


class IndexedNodes:
    """A table of sums, one row a number of replicas, one column a node. Columns whose queues have changed are renewed
    many at once, so that a question finds few that are not."""

    def __init__(self, node_of: Sequence[int]) -> None:
        names = sorted(set(node_of))
        at = {name: column for column, name in enumerate(names)}
        self._members: list[list[int]] = [[] for _ in names]
        self._place: list[int] = []
        for replica, name in enumerate(node_of):
            self._members[at[name]].append(replica)
        self._width = max(map(len, self._members), default=1)
        slot = {replica: i for members in self._members for i, replica in enumerate(members)}
        self._column = [at[name] for name in node_of]
        self._place = [self._column[replica] * self._width + slot[replica] for replica in range(len(node_of))]
        self._weights = np.full(len(names) * self._width, _TAKEN, dtype=np.int64)
        self._sums = np.empty((self._width, len(names)), dtype=np.int64)
        self._able = [False] * len(node_of)
        self._counts = [0] * len(names)
        self._with_count = [len(names)] + [0] * self._width
        self._total = 0
        self._changed = set(range(len(names)))

    def put(self, replica: int, weight: int) -> None:
        """See Nodes."""
        column = self._column[replica]
        if not self._able[replica]:
            self._able[replica] = True
            self._count(column, 1)
        self._weights[self._place[replica]] = weight
        changed = self._changed
        changed.add(column)
        if len(changed) >= _TOGETHER:
            self._renew()

    def put_all(self, replicas: Sequence[int], weights: Sequence[int]) -> None:
        """See Nodes."""
        self._weights[[self._place[replica] for replica in replicas]] = weights
        self._turn(replicas, True)

    def drop(self, replicas: Sequence[int]) -> None:
        """See Nodes."""
        self._weights[[self._place[replica] for replica in replicas]] = _TAKEN
        self._turn(replicas, False)

    def group(self, size: int) -> tuple[int, ...] | None:
        """See Nodes."""
        if self._total < size:
            return None
        self._renew()
        chosen: list[tuple[int, list[int]]] = []
        most, missing, with_count = self._width, size, list(self._with_count)
        while missing:
            while not with_count[most]:
                most -= 1
            want = min(missing, most)
            column = int(self._sums[want - 1].argmin())
            with_count[self._counts[column]] -= 1
            self._sums[:, column] = _TAKEN * (self._width + 1)
            self._changed.add(column)
            chosen.append((column, self._shortest(column, want)))
            missing -= want
        return tuple(replica for _, replicas in sorted(chosen) for replica in sorted(replicas))

    def _shortest(self, column: int, want: int) -> list[int]:
        low = column * self._width
        weights = self._weights[low : low + self._width].tolist()
        return [replica for _, replica in sorted(zip(weights, self._members[column], strict=False))[:want]]

    def _turn(self, replicas: Sequence[int], able: bool) -> None:
        counts: dict[int, int] = {}
        for replica in replicas:
            self._able[replica] = able
            column = self._column[replica]
            counts[column] = counts.get(column, 0) + 1
        for column, count in counts.items():
            self._count(column, count if able else -count)
        self._changed.update(counts)

    def _count(self, column: int, more: int) -> None:
        count = self._counts[column]
        self._with_count[count] -= 1
        self._with_count[count + more] += 1
        self._counts[column] = count + more
        self._total += more

    def _renew(self) -> None:
        if self._changed:
            columns = np.fromiter(self._changed, dtype=np.int64, count=len(self._changed))
            rows = self._weights.reshape(-1, self._width)[columns]
            rows.sort(axis=1)
            self._sums[:, columns] = rows.cumsum(axis=1).T
            self._changed.clear()
