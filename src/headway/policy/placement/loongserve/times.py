"""Predicted prefill times of sets of prompts, remembered."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.request import Request
from headway.perf.latency.groups import GroupLatency, GroupShape


def length(request: Request) -> int:
    """Prompt tokens to compute."""
    return max(1, request.prompt_tokens - request.cached_tokens)


class ScalingTimes:
    """What LoongServe's scaling information base answers (§5.5). `nodes`: the node of each instance of the pool, in
    order: sizes are asked for as if taken from the front. Decisions leave out what prompts have cached."""

    def __init__(self, latency: GroupLatency, nodes: Sequence[int], max_sp: int) -> None:
        self._latency, self._nodes = latency, nodes
        self._most = min(max_sp or len(nodes), len(nodes))
        self._known: dict[tuple[int, int, int], float] = {}

    def alone_s(self, tokens: int, sp: int, nodes: int) -> float:
        """One prompt on a group."""
        key = (tokens, sp, nodes)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._latency.prefill_s(0, tokens, GroupShape(sp, nodes))
        return found

    def batch_s(self, lengths: Sequence[int], instances: int) -> float:
        """Prompts as one batch on this many instances; infinite on none."""
        total = BatchSum(self, instances)
        for tokens in lengths:
            total.add(tokens)
        return total.seconds

    def shape(self, instances: int) -> tuple[int, int]:
        """(size, nodes) of a group of so many instances, or of the largest that is allowed."""
        size = min(instances, self._most)
        return size, len(set(self._nodes[:size]))


class BatchSum:
    """A batch that grows."""

    def __init__(self, times: ScalingTimes, instances: int) -> None:
        self._times, self._shape = times, times.shape(instances)
        self._fixed_s = times.alone_s(1, *self._shape) if instances else 0.0
        self.seconds = 0.0 if instances else float("inf")
        self._count = 0

    def with_one(self, tokens: int) -> float:
        """Seconds with one more prompt."""
        if not self._shape[0]:
            return float("inf")
        return self.seconds + self._times.alone_s(tokens, *self._shape) - (self._fixed_s if self._count else 0.0)

    def add(self, tokens: int) -> None:
        """One more prompt."""
        self.seconds = self.with_one(tokens)
        self._count += 1
