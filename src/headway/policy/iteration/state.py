"""State of one group (requests, batches in flight, KV), the shards that groups hold of long requests, and the check of
all invariants of a group.

`scheduler` makes batches from it and applies their results.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass

from headway.core.batch import Chunk
from headway.core.errors import InvariantError
from headway.core.request import Request, RequestEvent
from headway.kv.block_manager import BlockManager, KvLease, KvShardLease
from headway.kv.staged_kv import StagedKv
from headway.perf.latency.base import BatchLoad, LatencyModel, PrefillCache, load_s
from headway.policy.iteration.admission import ADMISSION_AGE_S, KvGrowth
from headway.policy.iteration.budget import reference_aim_s
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy, RemoteCost
from headway.policy.iteration.requests import WHOLE, DecodeSet, SequenceState


class ShardTable:
    """Requests of one instance that may need several shards, over all of its groups: where each shard is, which group
    the next one joins, and which requests make way for it."""

    def __init__(self) -> None:
        # States of the groups, in order of their numbers; each adds itself.
        self.states: list[GroupState] = []
        # Requests that may need several shards, by id, until they end.
        self.longs: dict[str, SequenceState] = {}
        # While a lockstep batch is packed: what shard holders add to a request's chunk.
        self.remote_costs: Callable[[str], RemoteCost] | None = None
        self._lockstep_groups: list[tuple[int, ...]] = []
        # Preemptions while scheduling, returned by the next `complete` or `lost`.
        self.pending_events: list[RequestEvent] = []
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

    # -- the next shard of a long request ------------------------------------------------------------------------

    def drain_events(self) -> list[RequestEvent]:
        """Return the pending events and clear them."""
        events, self.pending_events = self.pending_events, []
        return events

    def by_load(self) -> list[GroupState]:
        """Return the groups, the one with the least predicted work first.

        A request counts in all groups that hold it."""
        states = self.states
        seconds = [state.outstanding_s() for state in states]
        for sequence in self.longs.values():
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
            left = len(self.states) - 1 - len(sequence.shards)
            need = sequence.prompt + sequence.request.max_output_tokens - sequence.computed
            if left * sequence.limit < need:
                return False
        return self._join(sequence, now)

    def extend_prefills(self, now: float, able: Container[int]) -> None:
        """Transfer prefills whose shard is full to another group, and make way for the one that has waited too long.

        `able`: groups that could compute now. A transfer before its groups can compute would only put the new group
        into lockstep early."""
        for sequence in list(self.longs.values()):
            self._extend_prefill(sequence, now, able)
        # `skipped_since` of a request that holds KV: no group had blocks for its next shard (`_join`).
        stuck = [s for s in self.longs.values() if s.lease is not None and s.skipped_since is not None]
        oldest = min(stuck, key=lambda s: s.order, default=None)
        since = now if oldest is None or oldest.skipped_since is None else oldest.skipped_since
        late = oldest is not None and now - since >= ADMISSION_AGE_S
        held = set(self.holders(oldest)) if oldest is not None else set()
        for state in self.states:
            # Groups that hold a shard of it already cannot take the next one: no reason to close them.
            state.policy.admission.reserved_for = oldest if late and state.group not in held else None
        # Two long requests may wait for each other's blocks: evict the youngest, never the oldest. What it held is for
        # the oldest, at once: else no group could compute, `unblock` would evict the oldest too, and so for ever.
        if oldest is not None and late and len(stuck) > 1:
            self._evict(max(stuck, key=lambda s: s.order), now)
            self._extend_prefill(oldest, now, able)

    def _extend_prefill(self, sequence: SequenceState, now: float, able: Container[int]) -> None:
        """Transfer a prefill to another group if its shard is full and its group could compute now (`able`)."""
        full = sequence.lease is not None and sequence.room <= 0 < sequence.remaining
        if full and sequence.slot >= 0 and self.owner(sequence.request.id).group in able:
            self._join(sequence, now)

    def unblock(self, now: float) -> bool:
        """Evict the youngest long request that holds KV. False: none does.

        Called when nothing is in flight and nothing fits."""
        holding = [s for s in self.longs.values() if s.lease is not None]
        if holding:
            self._evict(max(holding, key=lambda s: s.order), now)
        return bool(holding)

    def _join(self, sequence: SequenceState, now: float) -> bool:
        """Transfer the request to the least loaded group with blocks for its next shard.

        False: there is none, it waits."""
        home = self.owner(sequence.request.id)
        held = set(self.holders(sequence))
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
            self.changed()
            return True
        if sequence.skipped_since is None:
            sequence.skipped_since = now
        return False

    def _evict(self, sequence: SequenceState, now: float) -> None:
        """Preempt a request unless it is in a batch in flight."""
        owner = self.owner(sequence.request.id)
        if not owner.is_in_flight(sequence):
            self.pending_events.append(owner.preempt(sequence, now))


def _reserve(state: GroupState, sequence: SequenceState, start: int, now: float) -> KvLease | None:
    """Reserve the next shard in a group, or return None.

    For a decode, younger requests are evicted as in its own group."""
    lease = state.growth.next_shard(sequence, start)
    while lease is None and sequence.decoding and state.evict_behind(sequence, now):
        lease = state.growth.next_shard(sequence, start)
    return lease


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


@dataclass(eq=False)
class BatchInFlight:
    """A group's part of a batch that has been handed out and not completed."""

    decodes: DecodeSet
    chunks: tuple[Chunk, ...]
    sequences: list[SequenceState]
    """The request of each chunk: kept here, since it may move to another group while the batch is in flight."""
    load: BatchLoad
    repeat: int
    """Most iterations that this batch may stand for."""


class GroupState:
    """Requests of one group, each in exactly one of: the policy's queue, `ready`, `waiting_for_kv`, a batch in flight.

    `audit` checks this."""

    def __init__(
        self,
        config: SchedulerConfig,
        latency: LatencyModel,
        block_manager: BlockManager,
        group: int = 0,
        shard_table: ShardTable | None = None,
        prefill_times: PrefillCache | None = None,
    ) -> None:
        self.config = config
        self.latency = latency
        self.block_manager = block_manager
        self.group = group
        # Of the whole instance; None: this is its only group.
        self.shard_table = shard_table
        if shard_table is not None:
            shard_table.states.append(self)
        remote_cost = shard_table.remote_cost if shard_table is not None else None
        self.policy = IterationPolicy(config, latency, block_manager, prefill_times, remote_cost)
        self.growth = KvGrowth(block_manager, self.policy.admission)
        self.staged_kv = StagedKv(block_manager)
        self.sequences: dict[str, SequenceState] = {}
        # Decodes that the next batch takes, all of them.
        self.ready = DecodeSet()
        # Decodes whose lease has no slot for their next token.
        self.waiting_for_kv: dict[str, SequenceState] = {}
        # Aborted requests that end when the batch they are in completes.
        self.aborting: dict[str, SequenceState] = {}
        # Decodes whose KV is staged when the batch they are in completes.
        self.staging: dict[str, SequenceState] = {}
        self.in_flight: dict[int, BatchInFlight] = {}
        # Preemptions while scheduling, returned by the next call that returns events.
        self.pending_events: list[RequestEvent] = []
        # Iterations so far; also the id of the next batch, if the instance has this group only.
        self.iterations = 0

    @property
    def only_decodes(self) -> bool:
        """Whether the group has ready decodes and nothing else."""
        return not (len(self.policy.queue) or self.waiting_for_kv or self.in_flight or self.aborting)

    def drain_events(self) -> list[RequestEvent]:
        """Return the pending events and clear them."""
        events, self.pending_events = self.pending_events, []
        return events

    def outstanding_s(self) -> float:
        """Return the predicted seconds of work ahead of a new request: waiting prefills, and one decode iteration."""
        load = self.decodes_load()
        return self.policy.waiting_s + (load_s(self.latency, load) if load.decodes else 0.0)

    def decodes_load(self) -> BatchLoad:
        """Return the load of all decodes, in flight or not, as an upper bound."""
        count = len(self.ready) + sum(len(batch.decodes) for batch in self.in_flight.values())
        # All leased KV, not the decodes' exact sum: it is the same however many steps a repeated batch takes at once.
        return BatchLoad(count, count, self.block_manager.used_tokens)

    def count_iterations(self, iterations: int = 1) -> None:
        """Count scheduled iterations, here and in the policy."""
        self.policy.began(iterations)
        self.iterations += iterations

    def is_in_flight(self, sequence: SequenceState) -> bool:
        """Whether a request of this group has a chunk or a decode in a batch in flight."""
        if sequence.in_flight:
            return True
        return any(sequence.request.id in batch.decodes.members for batch in self.in_flight.values())

    # -- decodes ------------------------------------------------------------------------------------------------

    def rejoin(self, decodes: DecodeSet) -> None:
        """Make the decodes of a completed batch ready again. O(smaller set): the smaller set joins the larger."""
        # Mostly `ready` is empty, and the set comes back whole with its epoch unchanged.
        if len(decodes.members) > len(self.ready.members):
            self.ready, decodes = decodes, self.ready
        for sequence in list(decodes.members.values()):
            decodes.settle(sequence)
            self.ready.add(sequence)

    def evict_behind(self, sequence: SequenceState, now: float) -> bool:
        """Preempt the youngest request that holds KV here, arrived after `sequence` and is in no batch in flight.

        Return False if there is none."""
        holders = (self.sequences[name] for name in self.policy.holders)
        # With the group that computes each one's rows: it preempts the request, whose state is there.
        behind = [(self, s) for s in holders if s.order > sequence.order]
        if self.shard_table is not None:
            # Shards of requests that other groups compute occupy blocks here as well.
            remote = self.shard_table.remote_holders(self.group)
            behind += [(self.shard_table.owner(s.request.id), s) for s in remote if s.order > sequence.order]
        free = ((owner, s) for owner, s in behind if not owner.is_in_flight(s))
        owner, victim = max(free, key=lambda found: found[1].order, default=(self, None))
        if victim is None:
            return False
        self.pending_events.append(owner.preempt(victim, now))
        return True

    def preempt(self, sequence: SequenceState, now: float) -> RequestEvent:
        """Preempt by recomputation: free the KV, keep the generated count, queue a prefill of all known tokens."""
        name = sequence.request.id
        if name in self.ready.members:
            self.ready.remove(sequence)
        self.waiting_for_kv.pop(name, None)
        computed, sequence.computed = sequence.computed, 0
        self._free(sequence)
        if self.block_manager.cache is not None:
            self.block_manager.cache.requeue(name)
        # `known` is read after `ready.remove` has settled the member: its generated tokens count.
        self.policy.lost(name, sequence.known)
        return RequestEvent("preempted", name, now, computed)

    # -- ends ---------------------------------------------------------------------------------------------------

    def end(self, sequence: SequenceState, now: float) -> RequestEvent:
        """Remove a finished or aborted request and free its KV."""
        self._remove(sequence)
        # Blocks of its output are cached with those of its prompt: the next turn of a conversation begins with both.
        self.block_manager.note_computed(sequence.request.id, sequence.computed)
        self._free(sequence)
        self._forget_prefix(sequence)
        return RequestEvent("aborted" if sequence.aborted else "finished", sequence.request.id, now)

    def _forget_prefix(self, sequence: SequenceState) -> None:
        if self.block_manager.cache is not None:
            self.block_manager.cache.forget(sequence.request.id)

    def leave_staged(self, sequence: SequenceState, now: float) -> RequestEvent:
        """Remove a request and keep its KV staged, for a transfer or for its next phase."""
        lease = sequence.lease
        assert lease is not None
        self._remove(sequence)
        self.block_manager.note_computed(sequence.request.id, sequence.computed)
        self._forget_prefix(sequence)
        sequence.lease = None
        self.staged_kv.store(lease)
        return RequestEvent("staged", sequence.request.id, now, sequence.computed)

    def transfer_out(self, sequence: SequenceState) -> None:
        """Remove a request that another group takes over; its lease becomes a shard. It must not decode in flight."""
        if sequence.request.id in self.ready.members:
            self.ready.remove(sequence)
        self._remove(sequence)

    def transfer_in(self, sequence: SequenceState) -> None:
        """Take over a request: compute its rows from now on. Its lease for the new shard is in this group."""
        self.sequences[sequence.request.id] = sequence
        self.policy.transfer_in(sequence)
        if sequence.decoding:
            self.ready.add(sequence)

    def _remove(self, sequence: SequenceState) -> None:
        name = sequence.request.id
        self.waiting_for_kv.pop(name, None)
        self.aborting.pop(name, None)
        self.staging.pop(name, None)
        self.policy.ended(name)
        del self.sequences[name]

    def _free(self, sequence: SequenceState) -> None:
        """Free the lease and all shards."""
        if sequence.lease is None:
            return
        self.block_manager.free(sequence.lease)
        sequence.lease = None
        if sequence.shards:
            for shard in sequence.shards:
                shard.block_manager.free(shard.lease)
            sequence.shards, sequence.base = (), 0
            if self.shard_table is not None:
                self.shard_table.changed()


# Size of the shards of a request that KV groups hold (Medha §3.3: groups join as the context grows, append-only).
#
# The limit is given in tokens or derived from the time of an iteration: the largest cache whose decode fits. A request
# that K such shards do not hold gets K equal ones. Departure from DESIGN.md §4: a chunk is cut at the edge of a shard
# and never straddles it.


def shard_tokens(config: SchedulerConfig, latency: LatencyModel, block_manager: BlockManager) -> int:
    """Return the limit of a shard in tokens: whole blocks, at least one, at most the pool."""
    given = config.kv_shard_tokens
    if given is None:
        given = _decodable(reference_aim_s(config, latency), latency, block_manager.total_tokens)
    return max(1, min(given, block_manager.total_tokens) // block_manager.block_tokens) * block_manager.block_tokens


def limit_of(request: Request, shard: int, groups: int, block_tokens: int) -> int:
    """Return the limit of this request's shards in tokens; WHOLE if one shard holds it: it never leaves its group."""
    # KV of the last output token is never read: max_output - 1, but one token at least.
    need = request.prompt_tokens + max(1, request.max_output_tokens - 1)
    if need <= shard:
        return WHOLE
    # A request too long for the usual shards gets one equal shard a group, rounded up to whole blocks.
    share = -(-need // groups)
    return max(shard, -(-share // block_tokens) * block_tokens)


def _decodable(t_target_s: float, latency: LatencyModel, most: int) -> int:
    """Return the largest number of cached tokens over which one decode takes at most `t_target_s`; at most `most`."""
    one_s = latency.rows_s(1)
    # Invariant: a decode over `low` tokens fits the time, one over `high` does not (or `high` is out of range).
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if one_s + latency.decode_s(1, middle) <= t_target_s:
            low = middle
        else:
            high = middle
    return low


# Check of all invariants of one group's scheduler. O(all requests): for idle moments and tests.


def audit(state: GroupState, remote: frozenset[str] = frozenset()) -> None:
    """Raise InvariantError unless cursors, sets and the block manager agree.

    `remote`: requests that have a shard in this group and whose rows another group computes."""
    block_manager, sequences = state.block_manager, state.sequences
    block_manager.check()
    sets = (state.ready, *(batch.decodes for batch in state.in_flight.values()))
    for group in sets:
        group.settle_all()
    # Every lease has exactly one owner: a sequence, a remote shard, or staged KV.
    leased = {s.request.id for s in sequences.values() if s.lease is not None}
    kept = set(state.staged_kv.names())
    if (
        leased | remote | kept != {lease.request for lease in block_manager.leases()}
        or leased != state.policy.holders.keys()
    ):
        raise InvariantError("sequences, staged KV and blocks disagree on which requests hold KV")
    if kept & (leased | remote):
        raise InvariantError(f"KV of {min(kept & (leased | remote))} is staged and has an owner")
    for sequence in sequences.values():
        # `computed` is below `base` only while chunks of the previous shard are in flight.
        landed = sequence.in_flight or sequence.base <= sequence.computed
        if not (sequence.computed <= sequence.scheduled <= sequence.known and landed):
            raise InvariantError(f"cursors of {sequence.request.id} are out of order")
        if sequence.lease is not None and sequence.scheduled - sequence.base > sequence.lease.tokens:
            raise InvariantError(f"{sequence.request.id} has been scheduled beyond its lease")
    # Each sequence is in exactly one place: a set, the queue, or in flight without being in the queue.
    homes = [*(s.request.id for s in state.policy.queue), *state.waiting_for_kv, *state.ready.members]
    homes += [name for batch in state.in_flight.values() for name in batch.decodes.members]
    # In flight and in no other set: last chunks, and aborted requests, which `withdraw` has taken off the queue.
    landing = {
        chunk.request
        for batch in state.in_flight.values()
        for chunk, sequence in zip(batch.chunks, batch.sequences, strict=True)
        if (chunk.last or sequence.aborted) and sequences.get(chunk.request) is sequence
    }
    homes += landing | {name for name, s in state.aborting.items() if s.in_flight}
    if len(homes) != len(set(homes)) or set(homes) != set(sequences):
        raise InvariantError("a request is nowhere, or in two places at once")
    for group in sets:
        if group.kv_sum != sum(s.computed + 1 - s.base for s in group.members.values()):
            raise InvariantError("a decode group's KV sum is off")
