"""LoongServe as a placement policy: one elastic pool, or two of which the second is for short prompts."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.errors import ConfigError
from headway.policy.placement.base import (
    Action,
    ActionRefused,
    Event,
    KvReady,
    PlacementPolicy,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    SpanDone,
    WakeupDue,
)
from headway.policy.placement.decode_placement import DecodePlacement
from headway.policy.placement.loongserve.greedy import GreedyDispatch
from headway.policy.placement.loongserve.options import LoongServeOptions
from headway.policy.placement.loongserve.pool import ElasticPool
from headway.policy.placement.registry import PolicyContext
from headway.policy.placement.view import ClusterSnapshot


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


__all__ = ["LoongServe", "LoongServeOptions", "loongserve"]
