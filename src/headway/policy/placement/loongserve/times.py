"""Predicted prefill times of batches of prompts, cached."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.request import Request
from headway.perf.latency.groups import GroupLatency, GroupShape


def length(request: Request) -> int:
    """Return the prompt tokens to compute: those that are not cached, at least 1."""
    return max(1, request.prompt_tokens - request.cached_tokens)


class ScalingTimes:
    """LoongServe's scaling information base (§5.5): prefill time by length and group size. Cached tokens of prompts are
    left out."""

    def __init__(self, latency: GroupLatency, nodes: Sequence[int], max_sp: int) -> None:
        """nodes: of each instance of the pool, in order; a group of some size is taken from the front. max_sp: largest
        group (0: no limit)."""
        self._latency, self._nodes = latency, nodes
        self._most = min(max_sp or len(nodes), len(nodes))
        self._known: dict[tuple[int, int, int], float] = {}

    def alone_s(self, tokens: int, sp: int, nodes: int) -> float:
        """Return the seconds of one prompt on a group."""
        key = (tokens, sp, nodes)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._latency.prefill_s(0, tokens, GroupShape(sp, nodes))
        return found

    def batch_s(self, lengths: Sequence[int], instances: int) -> float:
        """Return the seconds of prompts as one batch on so many instances; infinite on none."""
        total = BatchSum(self, instances)
        for tokens in lengths:
            total.add(tokens)
        return total.seconds

    def shape(self, instances: int) -> tuple[int, int]:
        """Return (size, nodes) of a group of so many instances, or of the largest allowed."""
        size = min(instances, self._most)
        return size, len(set(self._nodes[:size]))


class BatchSum:
    """Predicted time of a batch while prompts are added to it."""

    def __init__(self, times: ScalingTimes, instances: int) -> None:
        self._times, self._shape = times, times.shape(instances)
        self._fixed_s = times.alone_s(1, *self._shape) if instances else 0.0
        self.seconds = 0.0 if instances else float("inf")
        self._count = 0

    def with_one(self, tokens: int) -> float:
        """Return the seconds with one more prompt."""
        if not self._shape[0]:
            return float("inf")
        # the time of a single token counts once for the whole batch
        return self.seconds + self._times.alone_s(tokens, *self._shape) - (self._fixed_s if self._count else 0.0)

    def add(self, tokens: int) -> None:
        """Add a prompt."""
        self.seconds = self.with_one(tokens)
        self._count += 1
