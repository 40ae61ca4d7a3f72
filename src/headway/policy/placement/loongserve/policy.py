"""LoongServe as a placement policy: one elastic pool, or a small one for short prompts beside the rest."""

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
from headway.policy.placement.decode import DecodeSide
from headway.policy.placement.loongserve.greedy import GreedyDispatch
from headway.policy.placement.loongserve.options import LoongServeOptions
from headway.policy.placement.loongserve.pool import ElasticPool
from headway.policy.placement.registry import PolicyContext
from headway.policy.placement.view import ClusterSnapshot


def loongserve(surroundings: PolicyContext, options: LoongServeOptions) -> PlacementPolicy:
    """The variant that the options name."""
    return GreedyDispatch(surroundings, options) if options.prefill == "greedy" else LoongServe(surroundings, options)


class LoongServe:
    """See `loongserve.pool`. With decode instances in the cluster it is LoongServe-disaggregated (Tetris §7.1): only
    prefill instances are elastic, and decodes go by freeness. With `reserved`, prompts below `short_tokens` have the
    last so many instances, and the others the rest, each pool with a scheduler of its own (Medha §6.5)."""

    def __init__(self, surroundings: PolicyContext, options: LoongServeOptions) -> None:
        self._surroundings, self._options = surroundings, options
        self.pools: list[ElasticPool] = []
        self._pool_of: dict[str, ElasticPool] = {}
        self._side: DecodeSide | None = None
        self._tick_s = 0.0

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        pools = self.pools or self._make(view)
        if isinstance(event, RequestArrived):
            request = event.request
            pool = pools[-1] if request.prompt_tokens < self._options.short_tokens else pools[0]
            self._pool_of[request.id] = pool
            return pool.arrived(request, view)
        if isinstance(event, SpanDone):
            return self._pool_of[event.request].span_done(event.request, view)
        if isinstance(event, KvReady) and self._side is None:
            return self._pool_of[event.request].kv_ready(event.request, view)
        if isinstance(event, RequestFinished | RequestDropped):
            if self._side is not None:
                self._side.on_event(event)
            pool = self._pool_of.pop(event.request)
            return pool.ended(event.request, view, isinstance(event, RequestFinished))
        if isinstance(event, ActionRefused) and event.verb == "commit" and event.request in self._pool_of:
            pool = self._pool_of[event.request]
            return [*pool.withdrawn(event.request, view), *pool.plan(view)]
        if isinstance(event, WakeupDue):
            return [action for pool in pools for action in pool.plan(view)]
        return self._side.on_event(event) if self._side is not None else []

    def next_wakeup(self, now: float) -> float | None:
        """Time passes for decodes: what they would lose by a pause falls, and their KV grows."""
        if not any(pool.restless for pool in self.pools):
            return None
        if self._tick_s <= now:
            self._tick_s = now + self._options.wait_steps * self._options.decode_step_s
        return self._tick_s

    def _make(self, view: ClusterSnapshot) -> list[ElasticPool]:
        if view.with_role("decode"):
            self._side = DecodeSide()
        able = view.ordered(view.with_role("prefill", "mixed"))
        if not able:
            raise ConfigError("loongserve needs prefill or mixed instances")
        if self._options.reserved >= len(able):
            raise ConfigError(f"loongserve: `reserved` must leave one of {len(able)} instances")
        cut = len(able) - self._options.reserved
        latency, shape = self._surroundings.latency, self._surroundings.shape
        parts = [able[:cut], able[cut:]] if self._options.reserved else [able]
        self.pools = [ElasticPool(latency, shape, self._options, part, view, self._side) for part in parts]
        return self.pools


__all__ = ["LoongServe", "LoongServeOptions", "loongserve"]
