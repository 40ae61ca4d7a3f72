"""What a hosted policy's latency model has learned, for controllers that place requests: whole prompts' seconds."""

from __future__ import annotations

from headway.perf.latency.base import LatencyModel
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.efficient_chunks import NEWCOMER_EFFICIENCY, EfficientChunks
from headway.policy.iteration.iteration_budget import LONGEST_WAIT_S

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
        config, chunks = self._config, EfficientChunks(self._latency, self._config.max_num_batched_tokens)
        aim_s = chunks.target_s(config, 0)
        # As `IterationBudget`, where requests come rarely.
        if config.stages == 1 and config.newcomer_wait_s is not None:
            aim_s = max(aim_s, config.newcomer_wait_s)
        elif config.stages == 1:
            aim_s = max(aim_s, min(LONGEST_WAIT_S, chunks.useful_s(0, NEWCOMER_EFFICIENCY)))
        return PrefillCache(self._latency, aim_s, max(self._config.min_chunk, 16))

    def points(self) -> list[tuple[int, float]]:
        """Return (tokens, seconds) as of now."""
        if self._times.refresh():
            self._times = self._fresh()
        return [(tokens, self._times.total_s(tokens)) for tokens in self._sizes]
