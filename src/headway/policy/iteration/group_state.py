"""State of one group: its requests, the batches in flight, and eviction and release of KV.

`batch_builder` makes batches from it, `completion` applies their results, `scheduler` is the public interface.
"""

from __future__ import annotations

from headway.core.batch import Chunk
from headway.core.events import RequestEvent
from headway.kv.block_manager import BlockManager
from headway.kv.staged_kv import StagedKv
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.decodes import DecodeSet
from headway.policy.iteration.kv_growth import KvGrowth
from headway.policy.iteration.sequence import SequenceState
from headway.policy.iteration.shard_table import ShardTable


class BatchInFlight:
    """A group's part of a batch that has been handed out and not completed."""

    __slots__ = ("chunks", "decodes", "load", "repeat", "sequences")

    def __init__(
        self,
        decodes: DecodeSet,
        chunks: tuple[Chunk, ...],
        sequences: list[SequenceState],
        load: BatchLoad,
        repeat: int,
    ) -> None:
        self.decodes = decodes
        self.chunks = chunks
        # The request of each chunk: kept here, since it may move to another group while the batch is in flight.
        self.sequences = sequences
        self.load = load
        # Most iterations that this batch may stand for.
        self.repeat = repeat


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
