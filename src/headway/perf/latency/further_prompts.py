"""Attention of prompts that join a batch which has one already: a share of the time that each takes alone."""

from __future__ import annotations

import numpy as np

from headway.perf.latency.base import BatchLoad, LatencyModel, Seconds


class FurtherPrompts(LatencyModel):
    """View of a model in which every chunk is a further one of its batch."""

    def __init__(self, model: LatencyModel, share: Seconds) -> None:
        """share: by chunk tokens from 0 on, non-decreasing (the floors need it); the last holds for longer ones."""
        self.model, self.share = model, share
        self._last = share.size - 1

    def token_s(self, first: int, last: int) -> Seconds:
        return self.model.token_s(first, last)

    def rows_s(self, rows: int) -> float:
        return self.model.rows_s(rows)

    def least_rows_s(self, rows: int) -> float:
        return self.model.least_rows_s(rows)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        share = self.share[np.minimum(np.arange(first, last + 1), self._last)]
        return np.asarray(self.model.chunk_s(past, first, last) * share, dtype=np.float64)

    def attention_s(self, past: int, tokens: int) -> float:
        return self.model.attention_s(past, tokens) * float(self.share[min(tokens, self._last)])

    def least_attention_s(self, past: int, tokens: int) -> float:
        return self.model.least_attention_s(past, tokens) * float(self.share[min(tokens, self._last)])

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        return self.model.decode_s(decodes, kv_sum)

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        self.model.observe(load, measured_s)
