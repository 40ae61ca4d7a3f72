"""Which groups hold shards of which requests: the data that the groups of an instance share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from headway.policy.iteration.decision import RemoteCost
from headway.policy.iteration.sequence import SequenceState

if TYPE_CHECKING:
    from headway.policy.iteration.group_state import GroupState


class ShardTable:
    """Requests that may need several shards, and the states of all groups. It changes none of them."""

    def __init__(self) -> None:
        # States of the groups, in order of their numbers; each adds itself.
        self.states: list[GroupState] = []
        # Requests that may need several shards, by id, until they end.
        self.longs: dict[str, SequenceState] = {}
        # While a lockstep batch is packed: what shard holders add to a request's chunk.
        self.remote_costs: Callable[[str], RemoteCost] | None = None
        self._lockstep_groups: list[tuple[int, ...]] = []
        # Whether shards were added or freed since `_lockstep_groups` was computed.
        self._stale = True

    def owner(self, request_id: str) -> GroupState:
        """Return the group that computes a request's rows. Raises StopIteration for an unknown request."""
        return next(state for state in self.states if request_id in state.sequences)

    def holders(self, sequence: SequenceState) -> Iterable[int]:
        """Yield the groups that hold a shard of the request; the owner group last."""
        yield from (shard.group for shard in sequence.shards)
        yield self.owner(sequence.request.id).group

    def remote_holders(self, group: int) -> Iterator[SequenceState]:
        """Return the requests that have a shard in `group` and whose rows another group computes."""
        return (s for s in self.longs.values() if any(shard.group == group for shard in s.shards))

    def remote_cost(self, request_id: str) -> RemoteCost:
        """Return what the holders of a request's earlier shards add to its chunk.

        Only while a lockstep batch is packed."""
        assert self.remote_costs is not None
        return self.remote_costs(request_id)

    def changed(self) -> None:
        """Note that a request has got or freed a shard: other groups may have to compute in lockstep."""
        self._stale = True

    def lockstep_groups(self) -> list[tuple[int, ...]]:
        """Return the partition of the groups into sets that compute in lockstep."""
        if self._stale:
            self._lockstep_groups = connected(
                len(self.states), (self.holders(s) for s in self.longs.values() if s.shards)
            )
            self._stale = False
        return self._lockstep_groups


def connected(groups: int, spread: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    """Partition groups 0..groups-1 into sets that compute in lockstep, in order: the connected components.

    `spread`: for each request with shards in several groups, these groups."""
    # Groups with the same label are connected; the label is the smallest group number of the set.
    label = list(range(groups))
    for holders in spread:
        joined = {label[group] for group in holders}
        least = min(joined)
        label = [least if c in joined else c for c in label]
    return [tuple(g for g in range(groups) if label[g] == c) for c in sorted(set(label))]
