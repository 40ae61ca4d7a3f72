"""Scheduler of one KV group: add, schedule, complete, live and simulated alike; it builds batches, applies their
results, and places shards.

It never waits, reads a clock, or sees a token. `IterationPolicy` chooses the prefills and `BlockManager` accounts for
KV; requests move between the states that `state` holds.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq

from headway.core.batch import Batch, Chunk, GroupBatch, RemoteAttention, RequestProgress
from headway.core.errors import InvariantError, RequestError
from headway.core.request import Phase, Request, RequestEvent, Span
from headway.kv.block_manager import BlockManager, KvLease, KvShardLease
from headway.perf.latency.base import BatchLoad, LatencyModel, PrefillCache, decode_load, load_s
from headway.policy.iteration.admission import ADMISSION_AGE_S, refuse_unservable
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.requests import WHOLE, DecodeSet, SequenceState
from headway.policy.iteration.state import BatchInFlight, GroupState, ShardTable, audit


class BatchCompletion:
    """State changes of one group after a batch. Methods return events, in the order in which they became true."""

    def __init__(self, state: GroupState) -> None:
        self._state = state

    def complete(
        self, batch_id: int, results: Seq[RequestProgress], now: float, elapsed_s: float | None, repeats: int
    ) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self._state
        batch = state.in_flight.pop(batch_id, None)
        if batch is None:
            raise InvariantError(f"batch {batch_id} is not in flight")
        if not 1 <= repeats <= batch.repeat:
            raise InvariantError(f"batch {batch_id} may run {batch.repeat} times, not {repeats}")
        if elapsed_s is not None:
            state.policy.observed(batch.load, elapsed_s)
        state.policy.ended_iteration(now)
        if repeats > 1:
            # `commit` has counted the first.
            state.count_iterations(repeats - 1)
        events = state.drain_events()
        decodes = batch.decodes
        if decodes.members:
            # Step the set before any member leaves it: those that end or leave have computed this token too.
            decodes.step(repeats)
        prefilled = self._advance_prefills(batch, now, events)
        ended = self._ended(results, batch, prefilled) if results or state.aborting else {}
        for name, sequence in ended.items():
            if name in decodes.members:
                decodes.remove(sequence)
        # Ended requests are out of `decodes` by now: a request that ended leaves nothing staged.
        staging = [s for name, s in state.staging.items() if name in decodes.members] if state.staging else []
        for sequence in staging:
            decodes.remove(sequence)
        state.rejoin(decodes)
        events += [state.leave_staged(sequence, now) for sequence in staging]
        for name, sequence in prefilled.items():
            if name in ended:
                continue
            # A prefill-only request has its first token: keep its KV for the transfer, drop the request.
            if sequence.leaves_staged:
                events.append(state.leave_staged(sequence, now))
                continue
            state.ready.add(sequence)
            state.policy.decoding(name)
        events += [state.end(sequence, now) for sequence in ended.values()]
        return events

    def _advance_prefills(
        self, batch: BatchInFlight, now: float, events: list[RequestEvent]
    ) -> dict[str, SequenceState]:
        """Move the cursors of the chunks' requests.

        Return, by id, those whose last chunk this was: each has its next token."""
        prefilled: dict[str, SequenceState] = {}
        for chunk, sequence in zip(batch.chunks, batch.sequences, strict=True):
            sequence.computed += chunk.tokens
            sequence.in_flight -= 1
            self._state.block_manager.note_computed(chunk.request, sequence.computed)
            if chunk.last:
                prefilled[chunk.request] = sequence
                sequence.generated += 1
            if not sequence.started:
                sequence.started = True
                events.append(RequestEvent("started", chunk.request, now))
        return prefilled

    def _ended(
        self, results: Seq[RequestProgress], batch: BatchInFlight, prefilled: dict[str, SequenceState]
    ) -> dict[str, SequenceState]:
        """Return the requests in no later batch: reported as finished, or aborted and no longer in flight."""
        state = self._state
        ended: dict[str, SequenceState] = {}
        for result in results:
            if result.finished:
                ended[result.request] = state.sequences[result.request]
            elif result.accepted != 1 and not state.sequences[result.request].aborted:
                raise InvariantError(f"{result.request} goes on with {result.accepted} tokens of one iteration")
        if state.aborting:
            # An aborted prefill ends with its last chunk in flight, whether or not its prompt is complete.
            completed = (sequence.request.id for sequence in batch.sequences if not sequence.in_flight)
            here = {*batch.decodes.members, *prefilled, *completed}
            ended.update((name, sequence) for name, sequence in state.aborting.items() if name in here)
        return ended

    def abort(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self._state
        sequence = state.sequences.get(request_id)
        if sequence is None or sequence.aborted:
            return []
        sequence.aborted = True
        # Executors still write to its blocks: free them when the batch completes, not now.
        if state.is_in_flight(sequence):
            state.policy.withdraw(request_id)
            state.aborting[request_id] = sequence
            return []
        if request_id in state.ready.members:
            state.ready.remove(sequence)
        return [state.end(sequence, now)]

    def end_aborted(self, now: float) -> list[RequestEvent]:
        """End aborted requests of which no chunk or decode is in flight any more, in any group. Return their events."""
        state = self._state
        return [state.end(s, now) for s in list(state.aborting.values()) if not state.is_in_flight(s)]

    def stage(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self._state
        sequence = state.sequences.get(request_id)
        if sequence is None or sequence.aborted:
            return []
        if request_id in state.ready.members:
            state.ready.remove(sequence)
            return [state.leave_staged(sequence, now)]
        if request_id in state.waiting_for_kv:
            return [state.leave_staged(sequence, now)]
        # A request that is in flight, or computes lost KV again, leaves with its next token.
        sequence.leaves_staged = True
        if any(request_id in batch.decodes.members for batch in state.in_flight.values()):
            state.staging[request_id] = sequence
        return []

    def lost(self, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self._state
        for batch in state.in_flight.values():
            # Settle before sets are dropped: members' own cursors are stale while they are in a set.
            batch.decodes.settle_all()
        state.in_flight.clear()
        state.ready.settle_all()
        state.ready, state.waiting_for_kv = DecodeSet(), {}
        state.staging.clear()
        events = state.drain_events()
        for sequence in list(state.sequences.values()):
            sequence.in_flight = 0
            if sequence.aborted:
                events.append(state.end(sequence, now))
            elif sequence.lease is not None:
                events.append(state.preempt(sequence, now))
        state.staged_kv.lost()
        # Executors start from empty tables: operations that freed the lost KV must not be replayed.
        state.block_manager.clear_cache()
        state.block_manager.drain_ops()
        return events


# Placement of the next shard of a long request: which group it joins, and which requests make way for it.
#
# Works on the states of the groups (`GroupState`) and their `ShardTable`; `BatchBuilder` calls it for decodes,
# `GroupedScheduler` for prefills.


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
            self._extend_prefill(sequence, now, able)
        # `skipped_since` of a request that holds KV: no group had blocks for its next shard (`_join`).
        stuck = [s for s in table.longs.values() if s.lease is not None and s.skipped_since is not None]
        oldest = min(stuck, key=lambda s: s.order, default=None)
        since = now if oldest is None or oldest.skipped_since is None else oldest.skipped_since
        late = oldest is not None and now - since >= ADMISSION_AGE_S
        held = set(table.holders(oldest)) if oldest is not None else set()
        for state in table.states:
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
        if full and sequence.slot >= 0 and self.table.owner(sequence.request.id).group in able:
            self._join(sequence, now)

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


class BatchBuilder:
    """Batch builder of one group. `Scheduler` calls `build`; `LockstepBatch` calls the steps one by one."""

    def __init__(self, state: GroupState, placement: ShardPlacement | None = None) -> None:
        """placement: of shards, over all groups of the instance; None: this is its only group."""
        self._state = state
        self._placement = placement
        # Number of the last decode group that was put into a batch (`DecodeGroup.epoch`).
        self._epochs = 0

    def build(self, now: float, ahead: int, number: int) -> Batch | None:
        """Return a batch of this group alone, or None if there is nothing to compute. `number` is its id."""
        state = self._state
        # Decodes first: growing one may evict a prefill's KV, which changes the candidates.
        self.grow_decodes(now)
        decodes, latency = state.ready, state.latency
        load = decode_load(latency, len(decodes), decodes.kv_sum)
        chunks, load = self.pick_chunks(load, now) if len(state.policy.queue) else ([], load)
        if not decodes.members and not chunks:
            return None
        # Fast-forward only to the step at which a lease fills: growth may evict, which changes the batch.
        repeat = max(1, min(ahead, decodes.room())) if ahead > 1 and not chunks and state.only_decodes else 1
        part = self.commit(number, chunks, load, repeat)
        return Batch(id=number, parts=(part,), predicted_s=load_s(latency, load), repeat=repeat)

    def pick_chunks(
        self, load: BatchLoad, now: float, shorts_elsewhere: bool = False, budget_s: float | None = None
    ) -> tuple[list[Chunk], BatchLoad]:
        """Choose chunks of waiting prefills on top of `load`. Return them with the load of everything together.

        For lockstep only: `shorts_elsewhere`, short prefills wait in other groups of the batch; `budget_s`, the
        shortest TBT target of all its groups, seconds."""
        state = self._state
        policy, config = state.policy, state.config
        # `microbatch`: a prompt's next chunk enters after the previous one has left the last stage.
        skip = self._prefills_in_flight() if config.pipeline_schedule == "microbatch" else ()
        # A transfer that has waited too long for blocks goes before new requests, which would take those blocks.
        admits_new = not state.staged_kv.blocked(now, ADMISSION_AGE_S)
        decision = policy.pick(load, now, budget_s, skip, admits_new, shorts_elsewhere)
        chunks = []
        for quota in decision.quotas:
            name, tokens = quota.request, quota.tokens
            sequence = state.sequences[name]
            # `pick` has made the policy pledge KV, which here is a lease in the block manager.
            if sequence.lease is None:
                sequence.lease = state.block_manager.lease(name)
                # Cached tokens as of now: `pick` has set `scheduled` by the last change of the request's hit.
                sequence.computed = sequence.scheduled
            start = sequence.scheduled
            sequence.in_flight += 1
            # Move the cursor now: with several stages the next chunk is scheduled before this one returns.
            policy.moved(name, start + tokens)
            chunks.append(Chunk(name, start, tokens, sequence.remaining == 0, sequence.base))
        return chunks, decision.load

    def commit(
        self,
        number: int,
        chunks: Seq[Chunk],
        load: BatchLoad,
        repeat: int = 1,
        assists: tuple[RemoteAttention, ...] = (),
    ) -> GroupBatch:
        """Put all ready decodes and these chunks in flight. Return them as this group's part of batch `number`."""
        state = self._state
        # The set travels whole and comes back by `rejoin`: no work per member, and its epoch survives.
        decodes, state.ready = state.ready, DecodeSet()
        self._epochs += 1
        # Drain here: leases and evictions made while packing must reach executors with the rows that use these blocks.
        part = GroupBatch(
            state.group, decodes.group(self._epochs), tuple(chunks), state.block_manager.drain_ops(), assists
        )
        state.count_iterations()
        sequences = [state.sequences[chunk.request] for chunk in chunks]
        state.in_flight[number] = BatchInFlight(decodes, part.prefills, sequences, load, repeat)
        return part

    def grow_decodes(self, now: float) -> None:
        """Grow the leases of decodes that have filled theirs. Called before every batch."""
        if self._state.waiting_for_kv or self._state.ready.needs_blocks:
            self._grow_decodes(now)

    def _grow_decodes(self, now: float) -> None:
        state = self._state
        ready = state.ready
        # Oldest first, since each may evict younger ones.
        needy = sorted({*ready.take_full(), *state.waiting_for_kv.values()}, key=lambda s: s.order)
        state.waiting_for_kv = {}
        for sequence in needy:
            # Preempted for an older one earlier in this loop.
            if sequence.lease is None:
                continue
            self._allocate(sequence, now)
            name = sequence.request.id
            # `ShardPlacement.extend` has transferred it to another group.
            if name not in state.sequences:
                continue
            # True if the lease has a slot for the next token, whose index in this shard is `computed - base`.
            if sequence.lease.tokens > sequence.computed - sequence.base:
                if name in ready.members:
                    ready.watch(sequence)
                else:
                    ready.add(sequence)
            else:
                if name in ready.members:
                    ready.remove(sequence)
                state.waiting_for_kv[name] = sequence

    def _allocate(self, sequence: SequenceState, now: float) -> None:
        """Find KV for one decode: free blocks, else a shard in another group, else blocks of the youngest request.

        Return without it if there is none: the request then waits in `waiting_for_kv`."""
        state = self._state
        while not state.growth.grow(sequence):
            placement = self._placement
            if placement is not None and sequence.limit != WHOLE and placement.extend(sequence, now):
                return
            # A full shard cannot grow here whatever is evicted; else retry after each victim.
            if sequence.computed - sequence.base >= sequence.limit or not state.evict_behind(sequence, now):
                return

    def _prefills_in_flight(self) -> set[str]:
        sequences = self._state.sequences
        waiting = (sequences[prefill.request.id] for prefill in self._state.policy.queue)
        return {sequence.request.id for sequence in waiting if sequence.in_flight}


class Scheduler:
    """Deterministic: the same calls with the same times give the same batches. Implements `InstanceScheduler`.

    At most `config.stages` batches are in flight. A prefill is preempted at chunk edges and keeps its KV. KV is evicted
    (and computed again later) only when decodes cannot grow, youngest request first. Staged KV is never evicted.

    As one of several groups (`grouped_scheduler.GroupedScheduler`) it has a `ShardPlacement` and is driven a step at a
    time, through `state` and `builder`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        latency: LatencyModel,
        block_manager: BlockManager,
        group: int = 0,
        placement: ShardPlacement | None = None,
        prefill_times: PrefillCache | None = None,
    ) -> None:
        self.config = config
        self.latency = latency
        self.block_manager = block_manager
        self.group = group
        table = placement.table if placement is not None else None
        self.state = GroupState(config, latency, block_manager, group, table, prefill_times)
        self.builder = BatchBuilder(self.state, placement)
        self.completion = BatchCompletion(self.state)
        self.policy = self.state.policy
        self.staged_kv = self.state.staged_kv
        self._arrivals = 0

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def block_managers(self) -> tuple[BlockManager, ...]:
        return (self.block_manager,)

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        return len(self.policy.holders)

    @property
    def waiting(self) -> int:
        """Requests that hold none yet."""
        return len(self.state.sequences) - len(self.policy.holders)

    @property
    def idle(self) -> bool:
        return not self.state.sequences

    @property
    def open(self) -> bool:
        """Whether another batch may be in flight."""
        return len(self.state.in_flight) < self.config.stages

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.state.sequences

    def deadline_s(self, request_id: str) -> float:
        """See `InstanceScheduler`."""
        return self.state.sequences[request_id].deadline_s

    def predicted_ttft_s(self, request: Request, now: float) -> float:
        """See `InstanceScheduler`."""
        return self.policy.predicted_ttft_s(request, self.state.decodes_load(), now)

    def progress(self, request_id: str) -> int:
        """See `InstanceScheduler`."""
        return self.state.sequences[request_id].computed

    def check(self) -> None:
        """Raise InvariantError unless cursors, sets and the block manager agree.

        Called when idle, and by tests each step."""
        audit(self.state)

    # -- the three verbs ----------------------------------------------------------------------------------------

    def add(self, span: Span, now: float, phase: Phase = "all") -> None:
        """See `InstanceScheduler`."""
        request, staged_kv = span.request, self.staged_kv
        if request.id in self.state.sequences or staged_kv.waits(request.id):
            raise RequestError(f"request id {request.id!r} is in use", "id")
        # All checks come before `claim`: a refused request changes nothing.
        refuse_unservable(request, self.block_manager.total_tokens)
        lease = staged_kv.lease(request.id)
        # A decode-only request needs the KV of all its tokens but the last, whose row yields the next token.
        if phase == "decode" and (lease is None or request.cached_tokens < request.prompt_tokens - 1):
            raise RequestError(f"KV of {request.id!r} is not here", "id")
        # With one token left the request decodes at once, and its lease may grow by a block then.
        decodes = request.cached_tokens == request.prompt_tokens - 1
        if lease is not None and lease.tokens < request.prompt_tokens - decodes:
            raise RequestError(f"KV of {request.id!r} has room for {lease.tokens} tokens only", "id")
        if lease is not None:
            self.block_manager.join_cache(staged_kv.claim(request.id))
        sequence = self.enter(request, self._arrivals, lease=lease)
        sequence.leaves_staged = phase == "prefill"
        self._arrivals += 1

    def enter(self, request: Request, order: int, limit: int = WHOLE, lease: KvLease | None = None) -> SequenceState:
        """Create the state of a new request and queue it, or let it decode at once if one token is left to compute.

        `order`: count of arrivals on the instance. `limit`: tokens of a shard, WHOLE for a request in one group.
        `lease`: blocks of the cached tokens."""
        sequence = SequenceState(request, order)
        sequence.limit, sequence.lease, sequence.holds_kv = limit, lease, lease is not None
        # Cached tokens beyond the first shard are computed again: their KV belongs in other groups.
        sequence.scheduled = sequence.computed = min(request.cached_tokens, limit - 1)
        self.state.sequences[request.id] = sequence
        self.policy.add(sequence)
        if sequence.decoding:
            self.state.ready.add(sequence)
        return sequence

    def schedule(self, now: float, ahead: int = 1, free: Container[int] | None = None) -> Batch | None:
        """See `InstanceScheduler`.

        A batch may stand for several iterations if no request waits, nothing else is in flight and no decode needs
        KV."""
        if not self.open or (free is not None and self.group not in free):
            return None
        return self.builder.build(now, ahead, self.state.iterations)

    def complete(
        self, batch_id: int, results: Seq[RequestProgress], now: float, elapsed_s: float | None = None, repeats: int = 1
    ) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        return self.completion.complete(batch_id, results, now, elapsed_s, repeats)

    def abort(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        return self.completion.abort(request_id, now)

    def stage(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        return self.completion.stage(request_id, now)

    def lost(self, instance: int, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        return self.completion.lost(now)

    # -- a part of a lockstep batch -----------------------------------------------------------------------------

    def expect(self, batch_id: int, load: BatchLoad) -> None:
        """Set the load of a part in flight, remote attention included.

        Called by `LockstepBatch.commit`, after all parts are packed."""
        self.state.in_flight[batch_id].load = load

    def expected_s(self, batch_id: int) -> float:
        """Predicted seconds of this group's part of a batch in flight."""
        return load_s(self.latency, self.state.in_flight[batch_id].load)

    def yields_token(self, batch_id: int, request_id: str) -> bool:
        """Whether a request yields a token of this group's part of a batch in flight."""
        batch = self.state.in_flight[batch_id]
        return request_id in batch.decodes.members or any(c.last and c.request == request_id for c in batch.chunks)
