"""How long the next iteration may be: what it would delay, the time of an efficient chunk, and the strategies that size
chunks by it.

A decode without a target of its own gets the aim of the configuration, or by default of the machine (`aim`). Its tokens
are due at deadline + aim·j, so that one which is ahead lends its time to prefills (FairBatching, arXiv 2510.14392).
Departures from FairBatching: a gap target of a request, or a configured aim, bounds every gap and lends nothing; a
decode lends no more than makes chunks efficient, since a reader sees each gap; with pipeline stages nothing is lent,
and a newcomer waits no longer than a decode.
"""

from __future__ import annotations

import heapq
from collections import deque

from headway.perf.latency.base import MAX_CHUNK, LatencyModel
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.requests import PrefillState

LEAST_AIM_S = 0.055
"""Shortest default aim, seconds: a gap between tokens that a reader does not notice."""
LONGEST_AIM_S = 0.2
"""Longest default aim, seconds, however much a longer chunk would gain."""
DECODE_EFFICIENCY = 0.8
"""Share of the best tokens per second that the default target between two tokens gives a prefill."""
NEWCOMER_EFFICIENCY = 0.85
"""The same while nothing decodes, or decodes are ahead of their due times: only a newcomer would wait."""
GUESSED_EFFICIENCY = 0.9
"""Both under a rough model: where its rates are off, a chunk at 90% of its best rate may be at 70% of the true one."""
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
        """Return the smallest chunk whose rate alone is `DECODE_EFFICIENCY` of the best at a context, in tokens."""
        bucket = max(context, _LEAST_CONTEXT).bit_length()
        least = self._least.get(bucket)
        if least is None:
            points = self._points_of(bucket)
            enough = DECODE_EFFICIENCY * max(rate for rate, _ in points)
            first = next(i for i, (rate, _) in enumerate(points) if rate >= enough)
            least = self._least[bucket] = self._sizes[first]
        return least

    def newcomer_s(self, context: int) -> float:
        """Return the longest iteration, seconds, for which only a newcomer would wait."""
        return self.aim_s(context, GUESSED_EFFICIENCY if self._latency.rough else NEWCOMER_EFFICIENCY)

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
            return self.aim_s(context, GUESSED_EFFICIENCY if self._latency.rough else DECODE_EFFICIENCY)
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
            seconds = self._latency.rows_s(size) + self._latency.attention_s(context - size // 2, size)
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


LEAST_GAIN = 3.0
"""An iteration may take so many times what it costs to run one token, lest chunks pay for overhead."""
LONGEST_WAIT_S = 1.0
"""Longest iteration by default, however rare arrivals are, seconds."""
_WAIT_SHARE = 0.05
"""A newcomer's wait as a share of the expected time between arrivals."""
_GAPS = 4
"""Arrivals are expected at the shortest of so many past intervals: bursts end a quiet time at once."""
_QUIET = 5.0
"""Without arrivals for so many such intervals they are expected to be rarer (probability 0.7% of Poisson arrivals)."""


BACKGROUND_WAIT_S = 0.01
"""Longest iteration by default with tokens of a background request, while other requests come often, seconds."""
_BACKGROUND_SHARE = 0.02
"""The same as a share of the expected time between arrivals."""


class ArrivalGaps:
    """Expected time between requests that come while others are there, from the last few of them.

    No iteration delays a request that finds the engine idle, and idle time does not count: prompts that are sent one
    after another do not shorten iterations.
    """

    def __init__(self) -> None:
        # Until when the engine was busy, and how long it had been idle before.
        self._until_s: float | None = None
        self._idle_s = 0.0
        # Busy seconds at the last arrival that found it busy.
        self._last_s = 0.0
        self._gaps: deque[float] = deque(maxlen=_GAPS)

    def arrived(self, at_s: float, idle: bool) -> None:
        """Note an arrival. `idle`: no other request is there. Times that go backwards count as simultaneous."""
        if self._until_s is None:
            self._until_s = self._idle_s = at_s
        if idle:
            self._idle_s += max(0.0, at_s - self._until_s)
        else:
            gap_s = max(0.0, at_s - self._idle_s - self._last_s)
            self._gaps.append(gap_s)
            self._last_s += gap_s
        self.busy(at_s)

    def busy(self, until_s: float) -> None:
        """Note that requests were there until now."""
        if self._until_s is not None:
            self._until_s = max(self._until_s, until_s)

    def worked(self, seconds: float) -> None:
        """Note an iteration's duration, where its end is not told."""
        if self._until_s is not None:
            self._until_s += seconds

    def expected_s(self, now: float) -> float:
        """Return the expected interval, seconds; 0 before any arrival."""
        if self._until_s is None:
            return 0.0
        quiet_s = max(self._until_s, now) - self._idle_s - self._last_s
        # Without such an arrival the time that the engine was busy is all there is to go by.
        return max(min(self._gaps), quiet_s / _QUIET) if self._gaps else quiet_s


def newcomer_s(config: SchedulerConfig, chunks: EfficientChunks, context: int, expected_s: float) -> float:
    """Return the longest iteration while nothing decodes, seconds: what a request that arrives during it may wait.

    `expected_s`: between arrivals."""
    # What decodes would get is never too long for a newcomer.
    aim_s = chunks.target_s(config, context)
    if config.stages > 1:
        # A batch behind this one may hold a prompt's end, whose request decodes next.
        return aim_s
    if config.exact_target:
        return aim_s
    rare_s = min(LONGEST_WAIT_S, _WAIT_SHARE * expected_s, chunks.alone_s(context))
    return max(aim_s, chunks.newcomer_s(context), rare_s)


class TbtTargets:
    """Gap targets and due times of the decoding requests of one group, in seconds of one pipeline stage.

    Every decode gains a token in every iteration, so due times of requests with the same target move together: a heap
    by the due time less the target's seconds of all iterations so far never needs an update."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._gap_stages = config.gap_stages
        # With several stages a decode takes part in some iterations only, so its tokens cannot be counted by them.
        self._lends = config.stages == 1
        # Requests by gap target. Few distinct targets exist, so the minimum is cheap.
        self._gaps: dict[float, int] = {}
        # A configured target bounds every gap, whatever is due.
        self._has_due_times = config.t_target_s is None
        # Heaps of (due time of the next token as of iteration 0, request) by seconds a token.
        self._due: dict[float, list[tuple[float, str]]] = {}
        # Decoding requests: seconds a token (negative: a gap target) and heap key. Entries of other keys are stale.
        self.members: dict[str, tuple[float, float]] = {}

    def begin(self, state: PrefillState, aim_s: float, iteration: int) -> None:
        """Add a request that decodes after `iteration`. `aim_s`: seconds a token if it has no target of its own."""
        state.decoding = True
        slo, name = state.request.slo, state.request.id
        if slo.tbt_s is not None:
            # A token passes all stages, and may wait for the first: every stage time gets an equal part of its TBT.
            gap_s = slo.tbt_s / self._gap_stages
            self._gaps[gap_s] = self._gaps.get(gap_s, 0) + 1
            self.members[name] = (-gap_s, 0.0)
            return
        if not self._has_due_times:
            self.members[name] = (0.0, 0.0)
            return
        # Token j is due at deadline + j·aim: the next one, j = generated, as of now.
        key = state.deadline_s + aim_s * (state.generated - iteration)
        self.members[name] = (aim_s, key)
        heap = self._due.setdefault(aim_s, [])
        # Entries of ended requests leave the heap at its top only: drop them all before they outnumber the others.
        if len(heap) > 2 * len(self.members) + 16:
            heap[:] = [entry for entry in heap if self.members.get(entry[1]) == (aim_s, entry[0])]
            heapq.heapify(heap)
        heapq.heappush(heap, (key, name))

    def end(self, state: PrefillState) -> None:
        """Remove a request that no longer decodes, if it did: its KV was evicted."""
        if state.decoding:
            self.leave(state)
            state.decoding = False

    def leave(self, state: PrefillState) -> None:
        """Remove a decoding request that leaves this group. It stays marked as decoding."""
        aim_s, _ = self.members.pop(state.request.id, (0.0, 0.0))
        if aim_s < 0:
            left = self._gaps[-aim_s] - 1
            if left:
                self._gaps[-aim_s] = left
            else:
                del self._gaps[-aim_s]

    @property
    def asked(self) -> bool:
        """Whether a request that decodes has asked for a longest gap."""
        return bool(self._gaps)

    def least(self, t_target_s: float) -> float:
        """Return the shortest gap target, at most `t_target_s`."""
        return min(t_target_s, min(self._gaps)) if self._gaps else t_target_s

    def allowed(self, now: float, iteration: int, aim_s: float, longest_s: float) -> float:
        """Return the longest iteration, seconds, at most `longest_s`, that breaks no gap target and lets no token of
        the others become overdue.

        `aim_s` is allowed by requests without a gap target in any case: a late one gains no time by shorter chunks."""
        allowed_s = self.least(longest_s) if self._gaps else longest_s
        for each_s, heap in list(self._due.items()):
            while heap and self.members.get(heap[0][1]) != (each_s, heap[0][0]):
                heapq.heappop(heap)
            if not heap:
                del self._due[each_s]
                continue
            spare_s = heap[0][0] + each_s * iteration - now if self._lends else 0.0
            allowed_s = min(allowed_s, max(aim_s, spare_s))
        return allowed_s


class IterationBudget:
    """Time budget of the iterations of one group. Deterministic: time is an argument."""

    def __init__(self, config: SchedulerConfig, latency: LatencyModel) -> None:
        self._config = config
        self._latency = latency
        self.chunks = EfficientChunks(latency, config.max_num_batched_tokens)
        self.arrivals = ArrivalGaps()
        self.targets = TbtTargets(config)

    def begin(self, state: PrefillState, iteration: int, context: int) -> None:
        """Note that a request decodes after `iteration` iterations. Its tokens are due at the aim of this moment."""
        self.targets.begin(state, self._aim_s(context), iteration)

    def seconds(self, now: float, iteration: int, context: int) -> float:
        """Return the longest iteration that the running decodes and a possible newcomer allow, seconds.

        `iteration`: how many have begun. `context`: cached tokens of the long prompt in progress, on which the size of
        an efficient chunk depends."""
        config = self._config
        if not self.targets.members:
            bound_s = newcomer_s(config, self.chunks, context, self.arrivals.expected_s(now))
        elif config.t_target_s is not None:
            bound_s = self.targets.least(self._aim_s(context))
        else:
            longest_s = self.chunks.newcomer_s(context)
            bound_s = self.targets.allowed(now, iteration, self._aim_s(context), longest_s)
        # Floor: below a few times one token's cost an iteration is overhead only, and one tight target would stop
        # prefills.
        return bound_s if config.literal else max(bound_s, LEAST_GAIN * self._latency.rows_s(1))

    def background_s(self, now: float) -> float:
        """Return the longest iteration with tokens of a background request, seconds: no client waits for these, but
        arrivals and decodes wait for the iteration's end."""
        return max(BACKGROUND_WAIT_S, _BACKGROUND_SHARE * self.arrivals.expected_s(now))

    def _aim_s(self, context: int) -> float:
        """Return the target between two tokens, seconds."""
        return self.chunks.target_s(self._config, context)
