"""A latency model that corrects itself from what iterations really take.

Four scales (what is fixed, rows, decode attention, chunk attention) multiply a base model's terms and follow
measurements by recursive least squares with forgetting. So a server that starts on a rough measurement has sized its
chunks right after some dozens of iterations, and a machine that slows down is noticed. What is fixed has a scale of its
own because small iterations after a pause are slow without large ones being so. Deterministic: the same observations
in the same order give the same scales, so a recorded run replays exactly.
"""

from __future__ import annotations

import numpy as np

from headway.perf.latency.base import BatchLoad, LatencyModel, Seconds

_FORGET = 0.995
_FLOOR, _CEILING = 0.05, 20.0
_OUTLIER = 3.0


class CorrectedLatency(LatencyModel):
    """`LatencyModel` = base terms × learned scales, which are `scales` = (fixed, rows, decodes, chunks).

    Observations more than `_OUTLIER` times above the prediction are clipped to that (a descheduled process must not
    shrink every later chunk), so that a true change still comes through, over several iterations.
    """

    def __init__(self, base: LatencyModel, confidence: float = 1.0) -> None:
        """`confidence` is how much the base is trusted at the start: the prior's weight, in observations."""
        self.base = base
        self.confidence = confidence
        self.scales = np.ones(4)
        prior = 1.0 / max(confidence, 1e-6)
        self._p = np.eye(4) * prior
        self._most_trace = max(1.0, 4.0 * prior)
        self._fixed_s = base.rows_s(1)
        self._k_fixed = self._k_rows = self._k_decode = self._k_chunk = 1.0

    @property
    def chunk_scale(self) -> float:
        """What `chunk_s` multiplies the base by at present."""
        return self._k_chunk

    def token_s(self, first: int, last: int) -> Seconds:
        rows_s = self.base.token_s(first, last) * self._k_rows
        return np.asarray(np.maximum(rows_s + self._fixed_s * (self._k_fixed - self._k_rows), 0.0), dtype=np.float64)

    def rows_s(self, rows: int) -> float:
        return max(self.base.rows_s(rows) * self._k_rows + self._fixed_s * (self._k_fixed - self._k_rows), 0.0)

    def least_rows_s(self, rows: int) -> float:
        return max(self.base.least_rows_s(rows) * self._k_rows + self._fixed_s * (self._k_fixed - self._k_rows), 0.0)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        return self.base.chunk_s(past, first, last) * self._k_chunk

    def attention_s(self, past: int, tokens: int) -> float:
        return self.base.attention_s(past, tokens) * self._k_chunk

    def least_attention_s(self, past: int, tokens: int) -> float:
        return self.base.least_attention_s(past, tokens) * self._k_chunk

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        return self.base.decode_s(decodes, kv_sum) * self._k_decode

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """`load.chunk_s` is divided by the scale that it was told at, where the load notes it (`decode_load`)."""
        x = np.array(
            [
                self._fixed_s,
                self.base.rows_s(load.tokens) - self._fixed_s,
                self.base.decode_s(load.decodes, load.decode_kv) if load.decodes else 0.0,
                load.chunk_s / (load.chunk_scale or self._k_chunk),
            ]
        )
        predicted = float(x @ self.scales)
        if not (predicted > 0.0 and measured_s > 0.0):  # a NaN would stay for ever
            return
        measured_s = min(measured_s, _OUTLIER * predicted)
        # Relative residuals: a 1 ms decode step counts as much as a 50 ms chunk.
        x, error = x / predicted, measured_s / predicted - 1.0
        px = self._p @ x
        gain = px / (_FORGET + float(x @ px))
        self.scales = np.clip(self.scales + gain * error, _FLOOR, _CEILING)
        self._p = (self._p - np.outer(gain, px)) / _FORGET
        # What is not excited must not be forgotten altogether: the next sample would be believed blindly.
        trace = float(np.trace(self._p))
        if trace > self._most_trace:
            self._p *= self._most_trace / trace
        self._k_fixed, self._k_rows, self._k_decode, self._k_chunk = (float(s) for s in self.scales)
