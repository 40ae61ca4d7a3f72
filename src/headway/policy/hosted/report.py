"""What a hosted policy reports of itself: decision times, prediction errors, requested and achieved latencies, and
predicted prefill seconds for a controller.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from math import inf
from typing import Any

from headway.perf.latency.base import LatencyModel, PrefillCache
from headway.policy.iteration.budget import EfficientChunks, newcomer_s
from headway.policy.iteration.config import LONG_TOKENS, SchedulerConfig
from headway.policy.iteration.requests import PrefillState

_MOST_IN_FLIGHT = 64
"""Steps whose results never came are forgotten beyond so many."""

HostRequest = Any
"""vLLM's request; only its number of output tokens is read."""


class SloCounts:
    """How many requests asked for latencies and got them. A request counts when it ends.

    TTFT is taken when the step that ends the prompt comes back, TPOT as the mean from then to the end."""

    def __init__(self) -> None:
        # By (what, class of the request): asked, met, missed, missed_ttft, missed_tpot.
        self.counts: Counter[tuple[str, str]] = Counter()
        # By step in flight: requests whose prompt ends in it.
        self._in_flight: OrderedDict[int, Sequence[tuple[PrefillState, HostRequest]]] = OrderedDict()
        # By id: the request, and when its first output token came.
        self._open: dict[str, tuple[PrefillState, HostRequest, float]] = {}

    def scheduled(self, step: int, completed: Sequence[tuple[PrefillState, HostRequest]]) -> None:
        """Note the requests whose prompt is complete with step `step`."""
        asked = [pair for pair in completed if pair[0].request.slo.ttft_s or pair[0].request.slo.tbt_s]
        if asked:
            self._in_flight[step] = asked
            if len(self._in_flight) > _MOST_IN_FLIGHT:
                self._in_flight.popitem(last=False)

    def returned(self, step: int, now: float) -> None:
        """Note that the results of a step have come."""
        for state, request in self._in_flight.pop(step, ()):
            # A preempted request completes its prompt twice.
            self._open.setdefault(state.request.id, (state, request, now))

    def ended(self, request_id: str, now: float) -> None:
        """Count a request that has ended. One without a first token counts for nothing: it was aborted."""
        entry = self._open.pop(request_id, None)
        if entry is None:
            # Aborted: its first token may still be on its way.
            for step, completed in self._in_flight.items():
                self._in_flight[step] = [pair for pair in completed if pair[0].request.id != request_id]
            return
        state, request, first_s = entry
        slo, kind = state.request.slo, "long" if state.prompt > LONG_TOKENS else "short"
        missed = []
        if slo.ttft_s is not None and first_s - state.request.arrival_s > slo.ttft_s:
            missed.append("missed_ttft")
        gaps = request.num_output_tokens - 1
        if slo.tbt_s is not None and gaps > 0 and (now - first_s) / gaps > slo.tbt_s:
            missed.append("missed_tpot")
        for what in ("asked", "missed" if missed else "met", *missed):
            self.counts[what, kind] += 1


class HostStats:
    """Statistics of one scheduler since its start."""

    def __init__(self) -> None:
        self.slo = SloCounts()
        self.decision_s: deque[float] = deque(maxlen=1024)
        """Seconds that the policy took in each of the last steps."""
        self.error_share = 0.0
        """Exponential mean of the relative error of predicted step times, over about 50 steps."""
        self._steps = 0
        self._seconds = dict.fromkeys(("schedule", "busy", "predicted"), 0.0)

    def decided(self, seconds: float) -> None:
        """Note the time that the policy took in one step."""
        self.decision_s.append(seconds)
        self._seconds["schedule"] += seconds

    def measured(self, seconds: float, predicted_s: float) -> None:
        """Note a step's time."""
        self._steps += 1
        self._seconds["busy"] += seconds
        self._seconds["predicted"] += predicted_s
        self.error_share += 0.02 * (abs(seconds - predicted_s) / max(seconds, 1e-6) - self.error_share)

    @property
    def median_s(self) -> float:
        """Median seconds of the last decisions; 0 without any."""
        return self._quantile_s(0.5)

    def _quantile_s(self, share: float) -> float:
        times = sorted(self.decision_s)
        return times[min(len(times) - 1, int(len(times) * share))] if times else 0.0

    def snapshot(self, errors: int) -> dict[str, Any]:
        """Return all numbers. `errors`: policy errors so far."""
        return {
            "iterations": self._steps,
            "policy_errors": errors,
            "prediction_error": self.error_share,
            "decision_s": {"0.5": self._quantile_s(0.5), "0.99": self._quantile_s(0.99)},
            "seconds": dict(self._seconds),
            "slo": [[what, kind, count] for (what, kind), count in sorted(self.slo.counts.items())],
        }


_FIRST, _FACTOR = 64, 4


class PrefillReport:
    """Predicted seconds of prompts that are alone, by length. It only reads the model: no decision depends on it."""

    def __init__(self, latency: LatencyModel, config: SchedulerConfig, most_tokens: int) -> None:
        """most_tokens: of a prompt."""
        self._latency, self._config = latency, config
        self._times = self._fresh()
        self._sizes = [_FIRST]
        while self._sizes[-1] * _FACTOR <= most_tokens:
            self._sizes.append(self._sizes[-1] * _FACTOR)

    def _fresh(self) -> PrefillCache:
        """Return times in iterations as long as a prompt gets that nothing decodes beside."""
        config = self._config
        # As where requests come rarely.
        aim_s = newcomer_s(config, EfficientChunks(self._latency, config.max_num_batched_tokens), 0, inf)
        return PrefillCache(self._latency, aim_s, max(config.min_chunk, 16))

    def points(self) -> list[tuple[int, float]]:
        """Return (tokens, seconds) as of now."""
        if self._times.refresh():
            self._times = self._fresh()
        return [(tokens, self._times.total_s(tokens)) for tokens in self._sizes]
