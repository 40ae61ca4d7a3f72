"""Build the next batch of one group: grow KV of its decodes, size chunks of its prefills, mark both as in flight."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from headway.core.batch import Batch, Chunk, GroupBatch, RemoteAttention
from headway.core.request import BACKGROUND_PRIORITY
from headway.perf.latency.base import BatchLoad, decode_load, load_s
from headway.policy.iteration.admission import ADMISSION_AGE_S
from headway.policy.iteration.decodes import DecodeSet
from headway.policy.iteration.group_state import BatchInFlight, GroupState
from headway.policy.iteration.prefill import WHOLE
from headway.policy.iteration.sequence import SequenceState
from headway.policy.iteration.shard_placement import ShardPlacement


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
        return Batch(
            id=number,
            parts=(part,),
            predicted_s=load_s(latency, load),
            repeat=repeat,
            interruptible=self._interruptible(part),
        )

    def _interruptible(self, part: GroupBatch) -> bool:
        """Whether an arrival may interrupt a batch: one chunk of a background request is all of it."""
        if not self._state.config.interruptible_layers or part.decodes.members or len(part.prefills) != 1:
            return False
        return self._state.sequences[part.prefills[0].request].request.priority >= BACKGROUND_PRIORITY

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
