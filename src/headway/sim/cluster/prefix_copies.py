"""Prefix caches of a simulated cluster: what each instance has of a prompt, and copies between instances.

A scheduler's prompts are cached where they were prefilled, and where they decode. KV of spans is cached where the
request decodes. What the engine of a group of instances has cached is used by that group's later requests only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from headway.control.queue_entries import SpanEntry
from headway.policy.placement.base import CachedPrefix
from headway.sim.cluster.instance import SimulatedInstance
from headway.sim.prefix_cache import PrefixCacheUse
from headway.sim.workload import TraceRequest


class SimulatedPrefixCopies:
    """Look-ups over all engines of a cluster, and cached prefixes on their way from one to another."""

    def __init__(
        self,
        engines: Mapping[tuple[int, ...], SimulatedInstance],
        instances: int,
        arrives: Callable[[float, SimulatedInstance, str], None],
        changed: Callable[[SimulatedInstance], None],
    ) -> None:
        """engines: by their groups. arrives: schedules `arrived` for a time. changed: lets an engine start a batch."""
        self._engines, self._instances = engines, instances
        self._arrives, self._changed = arrives, changed
        self._queried_tokens = self._hit_tokens = 0

    def cached_tokens(self, source: TraceRequest) -> tuple[int, ...]:
        """Return how many tokens of a prompt each instance has cached; empty where none has any."""
        hits = [0] * self._instances
        for group, engine in self._engines.items():
            if engine.replica.prefixes is not None and len(group) == 1:
                hits[group[0]] = engine.replica.prefixes.cached_tokens(source)
        return tuple(hits) if any(hits) else ()

    def begin(self, target: SimulatedInstance, prefix: CachedPrefix | None, source: TraceRequest, now: float) -> int:
        """Begin to copy a prefix of a request that enters a scheduler. Return the tokens that come; 0: none.

        What its holder has evicted since the decision is not copied."""
        holder = None if prefix is None else self._engines.get((prefix.instance,))
        if prefix is None or holder is None or holder.replica.prefixes is None or target.replica.prefixes is None:
            return 0
        tokens = min(prefix.tokens, holder.replica.prefixes.cached_tokens(source))
        if holder is target or tokens <= target.replica.prefixes.cached_tokens(source):
            return 0
        name = target.replica.prefixes.begin_copy(source, tokens)
        if name is None:
            return 0
        self._arrives(now + prefix.copy_s, target, name)
        return tokens

    def arrived(self, target: SimulatedInstance, name: str) -> None:
        """Cache a prefix that has arrived, for which requests wait."""
        assert target.replica.prefixes is not None
        target.replica.prefixes.end_copy(name)
        self._changed(target)

    def count_span(self, entry: SpanEntry) -> None:
        """Count the look-up of a prompt that is computed in spans, with its first one."""
        if entry.index == 0:
            self._queried_tokens += entry.span.request.prompt_tokens
            self._hit_tokens += entry.span.start

    def use_of_spans(self, engines: Iterable[SimulatedInstance]) -> PrefixCacheUse | None:
        """Return the counters of prompts in spans; None where no engine has a prefix cache."""
        if all(engine.replica.prefixes is None for engine in engines):
            return None
        return PrefixCacheUse(self._queried_tokens, self._hit_tokens, 0)
