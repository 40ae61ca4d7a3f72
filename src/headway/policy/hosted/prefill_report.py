"""What a hosted policy's latency model has learned, for controllers that place requests: whole prompts' seconds."""

from __future__ import annotations

from math import inf

from headway.perf.latency.base import LatencyModel
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.efficient_chunks import EfficientChunks
from headway.policy.iteration.iteration_budget import newcomer_s

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
