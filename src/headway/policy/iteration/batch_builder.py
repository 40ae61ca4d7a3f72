"""Make the next batch of one group: KV for its decodes, chunks for its prefills, and what of both is in flight."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from headway.core.batch import Batch, Chunk, GroupBatch, RemoteAttention
from headway.perf.latency.base import BatchLoad, decode_load, load_s
from headway.policy.iteration.decodes import DecodeSet
from headway.policy.iteration.group_state import BatchInFlight, GroupState
from headway.policy.iteration.prefill import WHOLE
from headway.policy.iteration.sequence import SequenceState


class BatchBuilder:
    """Of one group. A group alone is asked to `build`; of several in lockstep, for each step by itself."""

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._epochs = 0  # of the decode groups in batches

    def build(self, now: float, ahead: int, number: int) -> Batch | None:
        """A batch of this group alone; None: there is nothing to compute."""
        state = self._state
        self.grow_decodes(now)
        decodes, latency = state.ready, state.latency
        load = decode_load(latency, len(decodes), decodes.kv_sum)
        chunks, load = self.pick_chunks(load, now) if len(state.policy.queue) else ([], load)
        if not decodes.members and not chunks:
            return None
        repeat = max(1, min(ahead, decodes.room())) if ahead > 1 and not chunks and state.only_decodes else 1
        part = self.commit(number, chunks, load, repeat)
        return Batch(id=number, parts=(part,), predicted_s=load_s(latency, load), repeat=repeat)

    def pick_chunks(
        self, load: BatchLoad, now: float, shorts_elsewhere: bool = False, budget_s: float | None = None
    ) -> tuple[list[Chunk], BatchLoad]:
        """Chunks of waiting prefills beside what is in `load`, and the load that they make together. In lockstep:
        whether short ones wait in other groups, and the shortest TBT target of all groups."""
        state = self._state
        policy, config = state.policy, state.config
        skip = self._prefills_in_flight() if config.pipeline_schedule == "microbatch" else ()
        # KV that is to come from elsewhere and has waited too long for room goes before new requests.
        admits_new = not state.custody.blocked(now, config.admission_age_s)
        decision = policy.pick(load, now, budget_s, skip, admits_new, shorts_elsewhere)
        chunks = []
        for quota in decision.quotas:
            name, tokens = quota.request, quota.tokens
            sequence = state.sequences[name]
            if sequence.lease is None:  # the policy has had its KV pledged
                sequence.lease = state.ledger.lease(name)
            start = sequence.scheduled
            sequence.in_flight += 1
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
        """All decodes that are ready and these chunks are in flight, as this group's part of batch `number`."""
        state = self._state
        decodes, state.ready = state.ready, DecodeSet()
        self._epochs += 1
        part = GroupBatch(state.group, decodes.group(self._epochs), tuple(chunks), state.ledger.drain_ops(), assists)
        state.count_iterations()
        sequences = [state.sequences[chunk.request] for chunk in chunks]
        state.in_flight[number] = BatchInFlight(decodes, part.prefills, sequences, load, repeat)
        return part

    def grow_decodes(self, now: float) -> None:
        """Give KV to decodes that have filled their lease. Before every batch."""
        if self._state.waiting_for_kv or self._state.ready.needs_blocks:
            self._grow_decodes(now)

    def _grow_decodes(self, now: float) -> None:
        state = self._state
        ready = state.ready
        # Oldest first: each may take the KV of younger ones.
        needy = sorted({*ready.take_full(), *state.waiting_for_kv.values()}, key=lambda s: s.order)
        state.waiting_for_kv = {}
        for sequence in needy:
            if sequence.lease is None:  # preempted for an older one, just now
                continue
            self._allocate(sequence, now)
            name = sequence.request.id
            if name not in state.sequences:  # another group has taken over
                continue
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
        """KV for one decode: free blocks, else a shard in another group, else that of the youngest request."""
        state = self._state
        while not state.growth.grow(sequence):
            others = state.neighbours
            if others is not None and sequence.limit != WHOLE and others.extend_shards(sequence, now):
                return
            if sequence.computed - sequence.base >= sequence.limit or not state.evict_behind(sequence, now):
                return

    def _prefills_in_flight(self) -> set[str]:
        sequences = self._state.sequences
        waiting = (sequences[prefill.request.id] for prefill in self._state.policy.queue)
        return {sequence.request.id for sequence in waiting if sequence.in_flight}
