"""Scheduler of one KV group, live and simulated alike, and the protocol that it and `GroupedScheduler` implement.

An engine or a simulator calls `add` and `abort` as requests come and go, `schedule` whenever a first pipeline stage is
free, and `complete` when a batch has been carried out. Deterministic: the same calls with the same times give the same
batches. `IterationPolicy` chooses the prefills and `BlockManager` accounts for KV; requests move between the states
that `state` holds.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from typing import Protocol

from headway.core.batch import Batch, Chunk, GroupBatch, RemoteAttention, RequestProgress
from headway.core.errors import InvariantError, PredictedLateError, RequestError
from headway.core.request import Phase, Request, RequestEvent, Span
from headway.kv.block_manager import BlockManager, KvLease
from headway.kv.staged_kv import StagedKv
from headway.perf.latency.base import BatchLoad, LatencyModel, PrefillCache, decode_load, load_s
from headway.policy.iteration.admission import ADMISSION_AGE_S, refuse_unservable
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.requests import WHOLE, DecodeSet, SequenceState
from headway.policy.iteration.state import BatchInFlight, GroupState, ShardTable, audit

LONGEST_RETRY_S = 60.0
"""Longest time after which a refused client is asked to try again, seconds."""


class InstanceScheduler(Protocol):
    """Scheduler of one instance: add → schedule → complete. It never waits, reads a clock, or sees a token."""

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def latency(self) -> LatencyModel: ...

    @property
    def block_managers(self) -> Seq[BlockManager]:
        """The block manager of each group, in order of the groups."""

    @property
    def running(self) -> int:
        """Requests that hold KV."""

    @property
    def waiting(self) -> int:
        """Requests that hold none yet."""

    @property
    def idle(self) -> bool: ...

    def __contains__(self, request_id: str) -> bool: ...

    def deadline_s(self, request_id: str) -> float:
        """Return when the first token of a request is due, seconds: by its SLO, else by the configured default."""

    def predicted_ttft_s(self, request: Request, now: float) -> float:
        """Return when a new request would have its first token, seconds after its arrival, if nothing came after it."""

    def progress(self, request_id: str) -> int:
        """Return how many tokens of a request have their KV in place; for one that decodes, a lower bound."""

    @property
    def staged_kv(self) -> StagedKv | None:
        """Staged KV, which no scheduled request owns; None: this instance stages none."""

    def add(self, span: Span, now: float, phase: Phase = "all") -> None:
        """Queue a request. Raises RequestError when it could never be served here, or its id is in use.

        KV staged under its id becomes its own: it must hold the `cached_tokens`, and have blocks for the whole prompt
        if more than the last token is left to compute. phase "prefill": the request ends with its first token
        (`staged`) and its KV is staged, unless that token is reported as its end. "decode": the KV of all tokens but
        the last must be staged."""

    def schedule(self, now: float, ahead: int = 1, free: Container[int] | None = None) -> Batch | None:
        """Return the next batch, or None: nothing to compute, or `stages` batches in flight in every group.

        `ahead` above 1 allows a batch of decodes that stands for up to so many iterations (`Batch.repeat`). `free`: the
        groups whose first stage can begin at once; None: all. Call it until it returns None: groups that share no
        request have batches of their own."""

    def complete(
        self, batch_id: int, results: Seq[RequestProgress], now: float, elapsed_s: float | None = None, repeats: int = 1
    ) -> list[RequestEvent]:
        """Apply a batch that has been carried out. Return the events since the last call, preemptions while scheduling
        included.

        `results` must contain the requests that have ended; any other request that yielded output (a decode of the
        batch, a prompt whose last chunk was in it) has accepted one token and goes on. `elapsed_s`: measured seconds,
        for latency models that learn. `repeats`: iterations carried out, at most the batch's `repeat`."""

    def abort(self, request_id: str, now: float) -> list[RequestEvent]:
        """Drop a request: at once, or when the batch that it is in completes. Unknown ids (ended) are ignored."""

    def stage(self, request_id: str, now: float) -> list[RequestEvent]:
        """End a request that will decode on another instance, and stage its KV: at once, or when its batch completes.

        Unknown ids (ended) are ignored, as is every call if `staged_kv` is None."""

    def lost(self, instance: int, now: float) -> list[RequestEvent]:
        """Reset after the instance has lost its KV, in all groups: batches in flight are void, all progress is redone.

        The next batches' KV operations start from empty block tables. Return events as `complete` does."""

    def check(self) -> None:
        """Raise InvariantError unless cursors, sets and block managers agree.

        Called when idle and by tests each step."""


def refuse_late(scheduler: InstanceScheduler, request: Request, now: float) -> None:
    """Raise PredictedLateError for a request that asked to be refused rather than late and is predicted to be late."""
    ttft_s = request.slo.ttft_s
    if not request.slo.refuse_late or ttft_s is None:
        return
    predicted_s = scheduler.predicted_ttft_s(request, now)
    if predicted_s <= ttft_s:
        return
    raise PredictedLateError(
        f"the first token would come after {predicted_s:.3g} s, later than the {ttft_s:g} s asked for ('refuse_late'); "
        "try again later, or ask for a later one",
        # By then what is ahead has advanced by as much as is missing.
        min(predicted_s - ttft_s, LONGEST_RETRY_S),
        predicted_s,
    )


class Scheduler:
    """Deterministic: the same calls with the same times give the same batches. Implements `InstanceScheduler`.

    At most `config.stages` batches are in flight. A prefill is preempted at chunk edges and keeps its KV. KV is evicted
    (and computed again later) only when decodes cannot grow, youngest request first. Staged KV is never evicted.

    As one of several groups (`groups.GroupedScheduler`) it has a `ShardTable` and is driven a step at a time: `build`,
    or the steps of it by `LockstepBatch`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        latency: LatencyModel,
        block_manager: BlockManager,
        group: int = 0,
        table: ShardTable | None = None,
        prefill_times: PrefillCache | None = None,
    ) -> None:
        self.config = config
        self.latency = latency
        self.block_manager = block_manager
        self.group = group
        self.state = GroupState(config, latency, block_manager, group, table, prefill_times)
        self.policy = self.state.policy
        self.staged_kv = self.state.staged_kv
        self._table = table
        self._arrivals = 0
        # Number of the last decode group that was put into a batch (`DecodeGroup.epoch`).
        self._epochs = 0

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

    # -- requests -----------------------------------------------------------------------------------------------

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

    # -- batches ------------------------------------------------------------------------------------------------

    def schedule(self, now: float, ahead: int = 1, free: Container[int] | None = None) -> Batch | None:
        """See `InstanceScheduler`.

        A batch may stand for several iterations if no request waits, nothing else is in flight and no decode needs
        KV."""
        if not self.open or (free is not None and self.group not in free):
            return None
        return self.build(now, ahead, self.state.iterations)

    def build(self, now: float, ahead: int, number: int) -> Batch | None:
        """Return a batch of this group alone, or None if there is nothing to compute. `number` is its id."""
        state = self.state
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
        state = self.state
        policy, config = state.policy, state.config
        # `microbatch`: a prompt's next chunk enters after the previous one has left the last stage.
        skip = self._prefills_in_flight() if config.pipeline_schedule == "microbatch" else ()
        # A transfer that has waited too long for blocks goes before new requests, which would take those blocks.
        admits_new = not state.staged_kv.blocked(now, ADMISSION_AGE_S)
        decision = policy.pick(load, now, budget_s, skip, admits_new, shorts_elsewhere)
        chunks = []
        for name, tokens in decision.quotas.items():
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
        state = self.state
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
        if self.state.waiting_for_kv or self.state.ready.needs_blocks:
            self._grow_decodes(now)

    def _grow_decodes(self, now: float) -> None:
        state = self.state
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
            # `ShardTable.extend` has transferred it to another group.
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
        state = self.state
        while not state.growth.grow(sequence):
            table = self._table
            if table is not None and sequence.limit != WHOLE and table.extend(sequence, now):
                return
            # A full shard cannot grow here whatever is evicted; else retry after each victim.
            if sequence.computed - sequence.base >= sequence.limit or not state.evict_behind(sequence, now):
                return

    def _prefills_in_flight(self) -> set[str]:
        sequences = self.state.sequences
        waiting = (sequences[prefill.request.id] for prefill in self.state.policy.queue)
        return {sequence.request.id for sequence in waiting if sequence.in_flight}

    def complete(
        self, batch_id: int, results: Seq[RequestProgress], now: float, elapsed_s: float | None = None, repeats: int = 1
    ) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self.state
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
            self.state.block_manager.note_computed(chunk.request, sequence.computed)
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
        state = self.state
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
        state = self.state
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
        state = self.state
        return [state.end(s, now) for s in list(state.aborting.values()) if not state.is_in_flight(s)]

    def stage(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self.state
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

    def lost(self, instance: int, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self.state
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
