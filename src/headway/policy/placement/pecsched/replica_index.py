"""Index of the replicas' queues by the work on them, for the placement of short prefills and of long requests.

A replica is in at most one of three sets: `free` (no long request), `colocated` (a long request decodes there) and
`paused` (one is paused there, or about to be). Replicas that are drained for a long prefill, or compute one, are in
none. An answer reads the top of a heap, at 8,192 replicas as at 32 (the cost of PecSched's own scan grows with the
cluster, its Fig. 15).
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.policy.placement.pecsched.argmin import ArgMin, HeapArgMin, ScanArgMin
from headway.policy.placement.pecsched.long_groups import SequenceParallelGroup
from headway.policy.placement.pecsched.nodes import IndexedNodes, NodeIndex, NodeSelection, ScanNodes


class ReplicaIndex:
    """Replicas 0, 1, … with their queues of short prefills."""

    def __init__(self, node_of: Sequence[int], *, literal: bool = False) -> None:
        """`node_of`: the node of each replica. literal: scan every replica for every answer; the answers are the
        same."""
        count = len(node_of)
        make = ScanArgMin if literal else HeapArgMin
        self.weight = [0] * count  # queue of short prefills, in the policy's unit
        self.tokens = [0] * count  # the same in tokens
        self.decodes = [0] * count  # short requests that decode
        # the long request of each replica
        self.group: list[SequenceParallelGroup | None] = [None] * count
        self.free: ArgMin = make(count)
        self.colocated: ArgMin = make(count)
        self.paused: ArgMin = make(count)
        self._nodes: NodeIndex = ScanNodes(node_of) if literal else IndexedNodes(node_of)
        # the set that each replica is in: `free`, `colocated`, `paused` or none
        self._set_of: list[ArgMin | None] = [None] * count
        for replica in range(count):
            self._move(replica, self.free)
            self._nodes.update(replica, 0)

    # -- short prefills -------------------------------------------------------------------------------------------

    def add_prefill(self, replica: int, weight: int, tokens: int) -> None:
        """Add a short prefill to a replica's queue."""
        group = self.group[replica]
        # before the counters change: `busy` rises with the replica's first short request only
        if group is None:
            self._nodes.update(replica, self.weight[replica] + weight)
        elif not self.occupied(replica):
            group.busy += 1
        self.weight[replica] += weight
        self.tokens[replica] += tokens
        members = self._set_of[replica]
        if members is not None:
            members.update(replica, self.weight[replica])

    def end_prefill(self, replica: int, weight: int, tokens: int) -> None:
        """Remove a short prefill from a replica's queue."""
        self.weight[replica] -= weight
        self.tokens[replica] -= tokens
        members = self._set_of[replica]
        if members is not None:
            members.update(replica, self.weight[replica])
        group = self.group[replica]
        # after the counters have changed: `busy` falls with the replica's last short request only
        if group is None:
            self._nodes.update(replica, self.weight[replica])
        elif not self.occupied(replica):
            group.busy -= 1

    def add_decodes(self, replica: int, more: int) -> None:
        """Change the number of short requests that decode on a replica. They only delay long requests."""
        # `busy` counts replicas with short requests: it changes with the first and the last one
        group, before = self.group[replica], self.occupied(replica)
        self.decodes[replica] += more
        if group is not None:
            group.busy += self.occupied(replica) - before

    def occupied(self, replica: int) -> bool:
        """Return whether a replica has short requests."""
        return bool(self.tokens[replica] or self.decodes[replica])

    def is_free(self, replica: int) -> bool:
        """Return whether a replica takes short requests and has no long one."""
        return self._set_of[replica] is self.free

    def fits(self, replica: int, tokens: int, most: int) -> bool:
        """Return whether a prompt of `tokens` may join: the queue is empty, or stays within `most` tokens."""
        queued = self.tokens[replica]
        return not queued or queued + tokens <= most

    # -- long requests --------------------------------------------------------------------------------------------

    def take(self, size: int) -> NodeSelection | None:
        """Select replicas for a long request, node first, least total queue; None if fewer are free of long requests.
        The caller calls `occupy` next."""
        return self._nodes.take(size)

    def occupy(self, group: SequenceParallelGroup) -> None:
        """Give a group the replicas selected for it; they take no short requests."""
        groups, sets, free, tokens, decodes = self.group, self._set_of, self.free, self.tokens, self.decodes
        for replica in group.replicas:
            # `_move(replica, None)` inlined: a group may have hundreds of replicas, all from `free`
            groups[replica] = group
            sets[replica] = None
            free.discard(replica)
            if tokens[replica] or decodes[replica]:
                group.busy += 1

    def release(self, group: SequenceParallelGroup) -> None:
        """Free all replicas of a group."""
        for replica in group.replicas:
            self.group[replica] = None
            self._move(replica, self.free)
        self._nodes.release(group.replicas, [self.weight[replica] for replica in group.replicas])

    def move_to(self, group: SequenceParallelGroup, members: ArgMin | None) -> None:
        """Move a group's replicas to the set `colocated` or `paused`; None: to none, they take no short prefills."""
        for replica in group.replicas:
            self._move(replica, members)

    def _move(self, replica: int, members: ArgMin | None) -> None:
        old = self._set_of[replica]
        if old is not None and old is not members:
            old.discard(replica)
        self._set_of[replica] = members
        if members is not None:
            members.update(replica, self.weight[replica])
