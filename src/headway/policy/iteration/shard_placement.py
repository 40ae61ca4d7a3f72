"""Placement of the next shard of a long request: which group it joins, and which requests make way for it.

Works on the states of the groups (`GroupState`) and their `ShardTable`; `BatchBuilder` calls it for decodes,
`GroupedScheduler` for prefills.
"""

from __future__ import annotations

from collections.abc import Container

from headway.core.events import RequestEvent
from headway.kv.block_manager import KvLease
from headway.kv.kv_shards import KvShardLease
from headway.policy.iteration.admission import ADMISSION_AGE_S
from headway.policy.iteration.group_state import GroupState
from headway.policy.iteration.sequence import SequenceState
from headway.policy.iteration.shard_table import ShardTable


class ShardPlacement:
    """Shards of the requests of one instance, over all of its groups."""

    def __init__(self, table: ShardTable) -> None:
        self.table = table
        # Preemptions while scheduling, returned by the next `complete` or `lost`.
        self.pending_events: list[RequestEvent] = []

    def drain_events(self) -> list[RequestEvent]:
        """Return the pending events and clear them."""
        events, self.pending_events = self.pending_events, []
        return events

    def by_load(self) -> list[GroupState]:
        """Return the groups, the one with the least predicted work first.

        A request counts in all groups that hold it."""
        states = self.table.states
        seconds = [state.outstanding_s() for state in states]
        for sequence in self.table.longs.values():
            if sequence.slot >= 0:
                for shard in sequence.shards:
                    seconds[shard.group] += sequence.work_s
        # The group number breaks ties, so that decisions are reproducible.
        return sorted(states, key=lambda state: (seconds[state.group], state.group))

    def extend(self, sequence: SequenceState, now: float) -> bool:
        """Transfer a decode, whose shard is full or cannot grow, to another group. False: none has blocks.

        Before the shard is full, another group joins only if the groups without a shard of this request, at full shard
        length, would hold the rest."""
        if sequence.computed - sequence.base < sequence.limit:
            # An early join wastes the tail of this shard: check that the remaining groups still suffice.
            left = len(self.table.states) - 1 - len(sequence.shards)
            need = sequence.prompt + sequence.request.max_output_tokens - sequence.computed
            if left * sequence.limit < need:
                return False
        return self._join(sequence, now)

    def extend_prefills(self, now: float, able: Container[int]) -> None:
        """Transfer prefills whose shard is full to another group, and make way for the one that has waited too long.

        `able`: groups that could compute now. A transfer before its groups can compute would only put the new group
        into lockstep early."""
        table = self.table
        for sequence in list(table.longs.values()):
            full = sequence.lease is not None and sequence.room <= 0 < sequence.remaining
            if full and sequence.slot >= 0 and table.owner(sequence.request.id).group in able:
                self._join(sequence, now)
        # `skipped_since` of a request that holds KV: no group had blocks for its next shard (`_join`).
        stuck = [s for s in table.longs.values() if s.lease is not None and s.skipped_since is not None]
        oldest = min(stuck, key=lambda s: s.order, default=None)
        since = now if oldest is None or oldest.skipped_since is None else oldest.skipped_since
        late = oldest is not None and now - since >= ADMISSION_AGE_S
        held = set(table.holders(oldest)) if oldest is not None else set()
        for state in table.states:
            # Groups that hold a shard of it already cannot take the next one: no reason to close them.
            state.policy.admission.reserved_for = oldest if late and state.group not in held else None
        # Two long requests may wait for each other's blocks: evict the youngest, never the oldest.
        if late and len(stuck) > 1:
            self._evict(max(stuck, key=lambda s: s.order), now)

    def unblock(self, now: float) -> bool:
        """Evict the youngest long request that holds KV. False: none does.

        Called when nothing is in flight and nothing fits."""
        holding = [s for s in self.table.longs.values() if s.lease is not None]
        if holding:
            self._evict(max(holding, key=lambda s: s.order), now)
        return bool(holding)

    def _join(self, sequence: SequenceState, now: float) -> bool:
        """Transfer the request to the least loaded group with blocks for its next shard.

        False: there is none, it waits."""
        home = self.table.owner(sequence.request.id)
        held = set(self.table.holders(sequence))
        start = sequence.scheduled
        for state in self.by_load():
            if state.group in held:
                continue
            lease = _reserve(state, sequence, start, now)
            if lease is None:
                continue
            assert sequence.lease is not None
            # The old shard ends at `scheduled`: chunks in flight still write below it, none writes beyond.
            shard = KvShardLease(home.group, home.block_manager, sequence.lease, sequence.base, start - sequence.base)
            home.transfer_out(sequence)
            sequence.shards += (shard,)
            sequence.base, sequence.lease, sequence.skipped_since = start, lease, None
            state.transfer_in(sequence)
            self.table.changed()
            return True
        if sequence.skipped_since is None:
            sequence.skipped_since = now
        return False

    def _evict(self, sequence: SequenceState, now: float) -> None:
        """Preempt a request unless it is in a batch in flight."""
        owner = self.table.owner(sequence.request.id)
        if not owner.is_in_flight(sequence):
            self.pending_events.append(owner.preempt(sequence, now))


def _reserve(state: GroupState, sequence: SequenceState, start: int, now: float) -> KvLease | None:
    """Reserve the next shard in a group, or return None.

    For a decode, younger requests are evicted as in its own group."""
    lease = state.growth.next_shard(sequence, start)
    while lease is None and sequence.decoding and state.evict_behind(sequence, now):
        lease = state.growth.next_shard(sequence, start)
    return lease
