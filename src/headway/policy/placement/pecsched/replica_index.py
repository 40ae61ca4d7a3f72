"""Where short prefills may go, and where long requests may: the replicas' queues, indexed by what is on them.

Every replica is in at most one of three sets: `free` (no long request there), `beside` (one decodes there) and `paused`
(one is paused there, or about to be). What is drained for a long prefill, or computes one, is in none. Asking costs a
look at the top of a heap, at 8,192 replicas as at 32 (PecSched's own scan grows with the cluster, its Fig. 15).
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.policy.placement.pecsched.argmin import ArgMin, HeapArgMin, ScanArgMin
from headway.policy.placement.pecsched.long_groups import SequenceParallelGroup
from headway.policy.placement.pecsched.nodes import IndexedNodes, NodeIndex, NodeSelection, ScanNodes


class ReplicaIndex:
    """Replicas 0, 1, … with queues of short prefills: weight (the unit of the policy's queues, whole numbers) and
    tokens."""

    def __init__(self, node_of: Sequence[int], *, literal: bool = False) -> None:
        """`node_of`: the node of each replica. literal: look at every replica for every answer; same answers."""
        count = len(node_of)
        make = ScanArgMin if literal else HeapArgMin
        self.weight = [0] * count
        self.tokens = [0] * count
        self.decodes = [0] * count
        self.ring: list[SequenceParallelGroup | None] = [None] * count
        self.free: ArgMin = make(count)
        self.beside: ArgMin = make(count)
        self.paused: ArgMin = make(count)
        self._nodes: NodeIndex = ScanNodes(node_of) if literal else IndexedNodes(node_of)
        self._home: list[ArgMin | None] = [None] * count
        for replica in range(count):
            self._move(replica, self.free)
            self._nodes.put(replica, 0)

    # -- short prefills -------------------------------------------------------------------------------------------

    def add(self, replica: int, weight: int, tokens: int) -> None:
        """One more is on its way to this replica."""
        ring = self.ring[replica]
        if ring is None:
            self._nodes.put(replica, self.weight[replica] + weight)
        elif not self.occupied(replica):
            ring.busy += 1
        self.weight[replica] += weight
        self.tokens[replica] += tokens
        home = self._home[replica]
        if home is not None:
            home.put(replica, self.weight[replica])

    def done(self, replica: int, weight: int, tokens: int) -> None:
        """One has ended there."""
        self.weight[replica] -= weight
        self.tokens[replica] -= tokens
        home = self._home[replica]
        if home is not None:
            home.put(replica, self.weight[replica])
        ring = self.ring[replica]
        if ring is None:
            self._nodes.put(replica, self.weight[replica])
        elif not self.occupied(replica):
            ring.busy -= 1

    def decode(self, replica: int, more: int) -> None:
        """A short request decodes there from now on (1), or no longer (-1). It is in nobody's way but a ring's."""
        ring, before = self.ring[replica], self.occupied(replica)
        self.decodes[replica] += more
        if ring is not None:
            ring.busy += self.occupied(replica) - before

    def occupied(self, replica: int) -> bool:
        """Whether short requests are there."""
        return bool(self.tokens[replica] or self.decodes[replica])

    def room(self, replica: int, tokens: int, most: int) -> bool:
        """Whether a prompt of `tokens` may join: the queue stays within `most`, or there is none."""
        queued = self.tokens[replica]
        return not queued or queued + tokens <= most

    # -- long requests --------------------------------------------------------------------------------------------

    def take(self, size: int) -> NodeSelection | None:
        """Replicas for a long request, node first, least total queue, which no other can have from now on; None when so
        many are not free of others. `hold` comes next."""
        return self._nodes.take(size)

    def hold(self, ring: SequenceParallelGroup) -> None:
        """It has what was taken for it; no short requests are sent there."""
        rings, homes, free, tokens, decodes = self.ring, self._home, self.free, self.tokens, self.decodes
        for replica in ring.group:
            rings[replica] = ring
            homes[replica] = None
            free.drop(replica)
            if tokens[replica] or decodes[replica]:
                ring.busy += 1

    def give_back(self, ring: SequenceParallelGroup) -> None:
        """All of its replicas are free again."""
        for replica in ring.group:
            self.ring[replica] = None
            self._move(replica, self.free)
        self._nodes.give_back(ring.group, [self.weight[replica] for replica in ring.group])

    def open(self, ring: SequenceParallelGroup, home: ArgMin | None) -> None:
        """Short prefills may go to its replicas as to `beside` or `paused`, or not at all (None)."""
        for replica in ring.group:
            self._move(replica, home)

    def _move(self, replica: int, home: ArgMin | None) -> None:
        old = self._home[replica]
        if old is not None and old is not home:
            old.drop(replica)
        self._home[replica] = home
        if home is not None:
            home.put(replica, self.weight[replica])
