"""Default aim of an iteration: the time of an efficient chunk, which depends on the machine and on the context."""

from __future__ import annotations

from headway.perf.latency.base import MAX_CHUNK, LatencyModel, one_chunk_s
from headway.policy.iteration.config import SchedulerConfig

LEAST_AIM_S = 0.055
"""Shortest default aim, seconds: a gap between tokens that a reader does not notice."""
LONGEST_AIM_S = 0.2
"""Longest default aim, seconds, however much a longer chunk would gain."""
DECODE_EFFICIENCY = 0.8
"""Share of the best tokens per second that the default target between two tokens gives a prefill."""
NEWCOMER_EFFICIENCY = 0.85
"""The same while nothing decodes, or decodes are ahead of their due times: only a newcomer would wait."""
ALONE_EFFICIENCY = 0.98
"""The same where newcomers are rare: longer iterations would gain a prompt next to nothing."""
USEFUL_SHARE = 0.99
"""A configured target gives no longer iterations than those whose chunks reach this share of the best rate: a prompt
would gain nothing, and others would wait."""
_GROWTH = 1.25
# No iteration is longer by default, so no longer one sets the best rate.
_LONGEST_COMPARED_S = 1.0
# Attention within a chunk is work, not overhead: rates of chunks are compared around the same context, which must
# exceed half of any chunk.
_LEAST_CONTEXT = MAX_CHUNK // 2


class EfficientChunks:
    """Iteration times of efficient chunks under one latency model, cached by context length up to a power of two."""

    def __init__(self, latency: LatencyModel, max_tokens: int) -> None:
        """`max_tokens`: most rows of an iteration."""
        self._latency = latency
        self._sizes = _sizes(min(max_tokens, MAX_CHUNK))
        # By context (its bit length): the rate in tokens/s and the seconds of each size.
        self._points: dict[int, list[tuple[float, float]]] = {}
        self._aims: dict[tuple[int, float], float] = {}
        self._least: dict[int, int] = {}

    def clear(self) -> None:
        """Drop cached times, after the latency model has changed."""
        self._points.clear()
        self._least.clear()
        self._aims.clear()

    def aim_s(self, context: int, share: float) -> float:
        """Return the shortest iteration, seconds, whose lone chunk reaches `share` of the best tokens per second.

        Within `LEAST_AIM_S` … `LONGEST_AIM_S`. `context`: tokens that the chunk attends."""
        return min(self.useful_s(context, share), LONGEST_AIM_S)

    def useful_s(self, context: int, share: float) -> float:
        """Return `aim_s` without its upper bound: beyond it a prompt gains less than the rest of the rate."""
        bucket = max(context, _LEAST_CONTEXT).bit_length()
        aim = self._aims.get((bucket, share))
        if aim is None:
            points = self._points_of(bucket)
            enough = share * max(rate for rate, _ in points)
            seconds = next(seconds for rate, seconds in points if rate >= enough)
            aim = self._aims[bucket, share] = max(seconds, LEAST_AIM_S)
        return aim

    def least_tokens(self, context: int) -> int:
        """Return the smallest chunk whose rate alone is `DECODE_EFFICIENCY` of the best at a context, in tokens.

        A rough model does not say: 0."""
        if self._latency.rough:
            return 0
        bucket = max(context, _LEAST_CONTEXT).bit_length()
        least = self._least.get(bucket)
        if least is None:
            points = self._points_of(bucket)
            enough = DECODE_EFFICIENCY * max(rate for rate, _ in points)
            least = self._least[bucket] = self._sizes[next(i for i, (rate, _) in enumerate(points) if rate >= enough)]
        return least

    def alone_s(self, context: int) -> float:
        """Return the iteration, seconds, beyond which a lone prompt gains next to nothing.

        A rough model does not say: no bound."""
        return float("inf") if self._latency.rough else self.useful_s(context, ALONE_EFFICIENCY)

    def target_s(self, config: SchedulerConfig, context: int) -> float:
        """Return the target between two tokens, seconds: the machine's, or as configured, but no more than is useful.

        A rough model does not say what is useful."""
        if config.t_target_s is not None and self._latency.rough:
            return config.t_target_s
        return self.useful_target_s(config, context)

    def useful_target_s(self, config: SchedulerConfig, context: int) -> float:
        """Return `target_s`, bounded by a rough model too: a prompt would gain nothing by more, and others wait."""
        configured_s = config.t_target_s
        if configured_s is None:
            return self.aim_s(context, DECODE_EFFICIENCY)
        if configured_s <= LEAST_AIM_S or config.exact_target:
            return configured_s
        return min(configured_s, self.useful_s(context, USEFUL_SHARE))

    def _points_of(self, bucket: int) -> list[tuple[float, float]]:
        points = self._points.get(bucket)
        if points is None:
            points = self._points[bucket] = self._measure(1 << (bucket - 1))
        return points

    def _measure(self, context: int) -> list[tuple[float, float]]:
        points = []
        for size in self._sizes:
            seconds = self._latency.rows_s(size) + one_chunk_s(self._latency, context - size // 2, size)
            points.append((size / seconds if seconds > 0 else float("inf"), seconds))
            if seconds > _LONGEST_COMPARED_S:
                break
        return points


def reference_aim_s(config: SchedulerConfig, latency: LatencyModel) -> float:
    """Return the target between two tokens for a prompt of moderate length.

    The unit of `long_iterations`, and the iteration of a predicted isolated prefill."""
    return EfficientChunks(latency, config.max_num_batched_tokens).useful_target_s(config, 0)


def _sizes(most: int) -> list[int]:
    """Return chunk sizes to compare, in tokens: a geometric grid that ends at `most`."""
    sizes, size = [], min(8, most)
    while size < most:
        sizes.append(size)
        size = max(size + 1, int(size * _GROWTH))
    return [*sizes, most]
