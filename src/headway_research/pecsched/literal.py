"""PecSched's decisions by looking at every replica, as its own scheduler makes them: the cost grows with the cluster.

The indexes of `headway.policy.placement.pecsched` give the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from headway.policy.placement.pecsched import PecSched
from headway.policy.placement.pecsched_replicas import HeapArgMin, IndexedNodes, NodeSelection, ReplicaIndex


class ScanArgMin(HeapArgMin):
    """The shortest queue, by looking at every replica."""

    __slots__ = ("_weight",)

    def __init__(self, count: int) -> None:
        self._weight: list[int | None] = [None] * count

    @override
    def update(self, replica: int, weight: int) -> None:
        self._weight[replica] = weight

    @override
    def discard(self, replica: int) -> None:
        self._weight[replica] = None

    @override
    def argmin(self) -> int:
        best, found = -1, 0
        for replica, weight in enumerate(self._weight):
            if weight is not None and (best < 0 or weight < found):
                best, found = replica, weight
        return best


class ScanNodes(IndexedNodes):
    """Selection by looking at every replica."""

    def __init__(self, node_of: Sequence[int]) -> None:
        """`node_of`: the node of each replica."""
        self._node_of = node_of
        self._weight: list[int | None] = [None] * len(node_of)

    @override
    def update(self, replica: int, weight: int) -> None:
        self._weight[replica] = weight

    @override
    def take(self, size: int) -> NodeSelection | None:
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


class ScanIndex(ReplicaIndex):
    """Replicas without an index."""

    ArgMin = ScanArgMin
    Nodes = ScanNodes


class LiteralPecSched(PecSched):
    """PecSched that scans all replicas for every decision."""

    Index = ScanIndex
