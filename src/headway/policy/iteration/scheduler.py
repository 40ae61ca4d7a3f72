"""Scheduler of one KV group (most instances have one): add → schedule → complete, live and simulated alike.

It never waits, reads a clock, or sees a token. `IterationPolicy` chooses the prefills and `BlockManager` accounts for
KV; `batch_builder` and `completion` move requests between states, which `group_state` holds.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq

from headway.core.batch import Batch, RequestProgress
from headway.core.errors import RequestError
from headway.core.events import RequestEvent
from headway.core.request import Request
from headway.core.span import Phase, Span
from headway.kv.block_manager import BlockManager, KvLease
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.admission import refuse_unservable
from headway.policy.iteration.audit import audit
from headway.policy.iteration.batch_builder import BatchBuilder
from headway.policy.iteration.completion import BatchCompletion
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.group_state import GroupState
from headway.policy.iteration.prefill import WHOLE
from headway.policy.iteration.sequence import SequenceState
from headway.policy.iteration.shard_placement import ShardPlacement


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

    def interrupted(self, batch_id: int, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        return self.completion.interrupted(batch_id, now)

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
