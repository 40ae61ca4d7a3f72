"""What a hosted policy's latency model has learned, for controllers that place requests: whole prompts' seconds."""

from __future__ import annotations

from headway.perf.latency.base import LatencyModel
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.efficient_chunks import reference_aim_s

_FIRST, _FACTOR = 64, 4


class PrefillReport:
    """Predicted seconds of prompts that are alone, by length. It only reads the model: no decision depends on it."""

    def __init__(self, latency: LatencyModel, config: SchedulerConfig, most_tokens: int) -> None:
        """most_tokens: of a prompt."""
        self._times = PrefillCache(latency, reference_aim_s(config, latency), max(config.min_chunk, 16))
        self._sizes = [_FIRST]
        while self._sizes[-1] * _FACTOR <= most_tokens:
            self._sizes.append(self._sizes[-1] * _FACTOR)

    def points(self) -> list[tuple[int, float]]:
        """Return (tokens, seconds) as of now."""
        self._times.refresh()
        return [(tokens, self._times.total_s(tokens)) for tokens in self._sizes]
