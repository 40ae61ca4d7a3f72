"""LoongServe as a placement policy: one elastic pool, or two, and the greedy variant that Tetris compares with."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.baselines import FixedSp, FixedSpOptions, by_free_time, first_free_of
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    ClusterSnapshot,
    Event,
    KvReady,
    PlacementPolicy,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    SpanDone,
    WakeupDue,
    final_tokens,
    members_for,
)
from headway.policy.placement.kv_places import DecodePlacement
from headway.policy.placement.registry import PolicyContext
from headway_research.loongserve.batching import LoongServeOptions
from headway_research.loongserve.pool import ElasticPool

# LoongServe's single-request scheduling as Tetris §2.4 describes and §7.1 compares with: it ignores the load.
#
# Each request, when it arrives, gets the size and group that end its own prefill first, queues included; of equal ends
# the larger group. Prefill instances only; decodes are placed as in Tetris.


class GreedyDispatch(FixedSp):
    """See above."""

    def __init__(self, context: PolicyContext, options: LoongServeOptions) -> None:
        super().__init__(context, FixedSpOptions(), name="loongserve")
        self._latency, self._options = context.latency, options
        self._instances: tuple[int, ...] = ()

    @override
    def _group(self, request: Request, view: ClusterSnapshot) -> tuple[int, ...]:
        """Return the group that ends the prompt's prefill first."""
        if not self._instances:
            self._instances = view.with_role("prefill")
            if not self._instances:
                raise ConfigError("loongserve: `prefill: greedy` needs a cluster of prefill (and decode) instances")
        past, tokens = request.cached_tokens, request.prompt_tokens - request.cached_tokens
        most = min(self._options.max_sp or len(self._instances), len(self._instances))
        # powers of two, and the largest group even if it is none
        sizes = sorted({1 << k for k in range(most.bit_length()) if 1 << k <= most} | {most})
        least = members_for(final_tokens(request), min(view.instances[i].capacity for i in self._instances))
        best, earliest_s = self._instances[:1], float("inf")
        nodes = by_free_time(view, self._instances)
        for size in (size for size in sizes if size >= least):
            group = first_free_of(view, nodes, size)
            start_s = max(view.now_s, *(view.instances[i].free_at_s for i in group))
            end_s = start_s + self._latency.prefill_s(past, tokens, GroupShape(size, view.nodes_of(group)))
            # sizes ascend: of equal ends the larger group
            if end_s <= earliest_s:
                best, earliest_s = group, end_s
        return best


def loongserve(context: PolicyContext, options: LoongServeOptions) -> PlacementPolicy:
    """Make the variant that the options name."""
    return GreedyDispatch(context, options) if options.prefill == "greedy" else LoongServe(context, options)


class LoongServe(PlacementPolicy):
    """Elastic pools (see `loongserve.pool`).

    With decode instances in the cluster this is LoongServe-disaggregated (Tetris §7.1): only prefill instances are
    elastic, and decodes are placed by freeness. With `reserved`, prompts below `short_tokens` have the last so many
    instances, and the others the rest, each pool with a scheduler of its own (Medha §6.5)."""

    def __init__(self, context: PolicyContext, options: LoongServeOptions) -> None:
        self._context, self._options = context, options
        self.pools: list[ElasticPool] = []
        self._pool_of: dict[str, ElasticPool] = {}
        self._decode_placement: DecodePlacement | None = None
        self._wake_s = 0.0

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        pools = self.pools or self._make_pools(view)
        if isinstance(event, RequestArrived):
            request = event.request
            pool = pools[-1] if request.prompt_tokens < self._options.short_tokens else pools[0]
            self._pool_of[request.id] = pool
            return pool.add(request, view)
        if isinstance(event, SpanDone):
            return self._pool_of[event.request].span_done(event.request, view)
        if isinstance(event, KvReady) and self._decode_placement is None:
            return self._pool_of[event.request].kv_ready(event.request, view)
        if isinstance(event, RequestFinished | RequestDropped):
            if self._decode_placement is not None:
                self._decode_placement.on_event(event)
            pool = self._pool_of.pop(event.request)
            return pool.remove(event.request, view, isinstance(event, RequestFinished))
        if isinstance(event, ActionRefused) and event.action == "commit" and event.request in self._pool_of:
            pool = self._pool_of[event.request]
            # the whole batch was refused: its requests wait again, and are planned with the new snapshot
            return [*pool.withdraw(event.request, view), *pool.plan(view)]
        if isinstance(event, WakeupDue):
            return [action for pool in pools for action in pool.plan(view)]
        return self._decode_placement.on_event(event) if self._decode_placement is not None else []

    def next_wakeup(self, now: float) -> float | None:
        """Return the time of the next look at the queue: while decodes run, the loss by pausing them falls and their KV
        grows. None while no pool depends on time."""
        if not any(pool.needs_wakeup for pool in self.pools):
            return None
        if self._wake_s <= now:
            self._wake_s = now + self._options.wait_steps * self._options.decode_step_s
        return self._wake_s

    def _make_pools(self, view: ClusterSnapshot) -> list[ElasticPool]:
        if view.with_role("decode"):
            self._decode_placement = DecodePlacement()
        instances = view.ordered(view.with_role("prefill", "mixed"))
        if not instances:
            raise ConfigError("loongserve needs prefill or mixed instances")
        if self._options.reserved >= len(instances):
            raise ConfigError(f"loongserve: `reserved` must leave one of {len(instances)} instances")
        # by (node, id): both pools keep to as few nodes as possible
        cut = len(instances) - self._options.reserved
        latency, shape = self._context.latency, self._context.shape
        parts = [instances[:cut], instances[cut:]] if self._options.reserved else [instances]
        self.pools = [ElasticPool(latency, shape, self._options, part, view, self._decode_placement) for part in parts]
        return self.pools
