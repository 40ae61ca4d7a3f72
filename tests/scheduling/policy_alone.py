"""An `IterationPolicy` that is driven alone, beside a scheduler, from what anyone outside the scheduler can see.

It has a pool of counted blocks and a latency model of its own. Whatever the scheduler puts into a batch, the policy
must have picked.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from tests.scheduling.scheduler_world import World

from headway.core.batch import Batch, Chunk, RequestProgress
from headway.core.request import RequestEvent, Span
from headway.kv.block_manager import KvLease
from headway.perf.latency.base import LatencyModel, decode_load, load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.scheduler import Scheduler


class CountedPool:
    """`KvPool` that only counts, with other words for its counts than `BlockManager` has.

    Its answers about waiting requests are used again, unlike `BlockManager`'s."""

    cache = None
    answers_hold = 16

    def __init__(self, n_blocks: int, block_tokens: int) -> None:
        self.n_blocks, self.block_tokens = n_blocks, block_tokens
        self.reserve_tokens = n_blocks * block_tokens // 64
        self.blocks: dict[str, int] = {}

    @property
    def total_tokens(self) -> int:
        return self.n_blocks * self.block_tokens

    @property
    def free_blocks(self) -> int:
        return self.n_blocks - sum(self.blocks.values())

    def needed_blocks(self, request_id: str, tokens: int) -> int:
        return -(-tokens // self.block_tokens) - self.held_blocks(request_id)

    def held_blocks(self, request_id: str) -> int:
        return self.blocks.get(request_id, 0)

    def pledge(self, request_id: str, tokens: int, headroom_blocks: int = 0) -> bool:
        needed = self.needed_blocks(request_id, tokens)
        if needed + headroom_blocks > self.free_blocks:
            return False
        self.blocks[request_id] = self.held_blocks(request_id) + needed
        return True


class PolicyBesideScheduler:
    """Passes calls on to a scheduler, and tells the policy what came of them."""

    def __init__(self, scheduler: Scheduler, latency: LatencyModel) -> None:
        self._scheduler = scheduler
        block_manager = scheduler.block_manager
        self.pool = CountedPool(block_manager.n_blocks, block_manager.block_tokens)
        self.policy = IterationPolicy(scheduler.config, latency, self.pool)
        self.picked = 0
        self._known: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._flights: dict[int, tuple[Batch, Any]] = {}
        self._preempts = False
        self._grow, self._free = block_manager.grow, block_manager.free
        block_manager.grow, block_manager.free = self.grow, self.free  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._scheduler

    # -- what the block manager does ---------------------------------------------------------------------------------

    def grow(self, lease: KvLease, tokens: int) -> bool:
        grown = self._grow(lease, tokens)
        self.pool.blocks[lease.request] = lease.blocks
        return grown

    def free(self, lease: KvLease) -> None:
        name = lease.request
        self._free(lease)
        del self.pool.blocks[name]
        if self._preempts and name not in self._aborted:
            self.policy.lost(name, self._known[name])

    # -- what is asked of the scheduler -------------------------------------------------------------------------

    def add(self, span: Span, now: float) -> None:
        self._scheduler.add(span, now)
        self.policy.enter(span.request)
        self._known[span.request.id] = span.request.prompt_tokens

    def schedule(self, now: float, ahead: int) -> Batch | None:
        config = self._scheduler.config
        if len(self._flights) == config.stages:
            return self._scheduler.schedule(now, ahead)
        self._preempts = True
        batch = self._scheduler.schedule(now, ahead)
        self._preempts = False
        chunks: tuple[Chunk, ...] = batch.parts[0].prefills if batch is not None else ()
        decodes, kv_sum = (batch.parts[0].decodes.count, batch.parts[0].decodes.kv_sum) if batch is not None else (0, 0)
        flying = {chunk.request for flight, _ in self._flights.values() for chunk in flight.parts[0].prefills}
        skip = flying if config.pipeline_schedule == "microbatch" else ()
        decision = self.policy.pick(decode_load(self.policy.latency, decodes, kv_sum), now, skip=skip)
        assert list(decision.quotas.items()) == [(c.request, c.tokens) for c in chunks]
        assert self.pool.free_blocks == self._scheduler.block_manager.free_blocks
        if batch is None:
            return None
        assert batch.predicted_s == load_s(self.policy.latency, decision.load)
        for chunk in chunks:
            self.policy.moved(chunk.request, chunk.start + chunk.tokens)
        self.policy.began()
        self.picked += len(chunks)
        self._flights[batch.id] = batch, decision.load
        return batch

    def complete(
        self, batch_id: int, results: Seq[RequestProgress], now: float, elapsed_s: float | None, repeats: int
    ) -> list[RequestEvent]:
        events = self._scheduler.complete(batch_id, results, now, elapsed_s, repeats)
        batch, load = self._flights.pop(batch_id)
        if elapsed_s is not None:
            self.policy.observed(load, elapsed_s)
        self.policy.began(repeats - 1)
        for name in batch.parts[0].decodes.members:
            self._known[name] += repeats
        for chunk in batch.parts[0].prefills:
            if chunk.last:
                self._known[chunk.request] += 1
                self.policy.decoding(chunk.request)
        self._hear(events)
        return events

    def abort(self, request_id: str, now: float) -> list[RequestEvent]:
        repeated = request_id in self._aborted or request_id not in self._scheduler
        self._aborted.add(request_id)
        events = self._scheduler.abort(request_id, now)
        if not events and not repeated:
            self.policy.withdraw(request_id)
        self._hear(events)
        return events

    def lost(self, instance: int, now: float) -> list[RequestEvent]:
        self._flights.clear()
        self._preempts = True
        events = self._scheduler.lost(instance, now)
        self._preempts = False
        self._hear(events)
        return events

    def _hear(self, events: list[RequestEvent]) -> None:
        for event in events:
            if event.kind in ("finished", "aborted"):
                self.policy.ended(event.request)


def beside(world: World) -> PolicyBesideScheduler:
    """A world whose scheduler has a policy beside it."""
    latency = CorrectedLatency(world.latency) if world.learns else world.latency
    assert isinstance(world.scheduler, Scheduler)
    world.scheduler = policy = PolicyBesideScheduler(world.scheduler, latency)  # type: ignore[assignment]
    return policy
