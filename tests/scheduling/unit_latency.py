"""A latency model to count with."""

from __future__ import annotations

import numpy as np

from headway.latency.base import Load, Seconds


class Linear:
    """`LatencyModel` where every row costs `row_s` and attention nothing: for arithmetic in the head."""

    def __init__(self, row_s: float = 0.01, fixed_s: float = 0.0) -> None:
        self.row_s, self.fixed_s = row_s, fixed_s

    def token_s(self, first: int, last: int) -> Seconds:
        return self.fixed_s + self.row_s * np.arange(first, last + 1, dtype=np.float64)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        return np.zeros(last - first + 1)

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        return 0.0

    def observe(self, load: Load, measured_s: float) -> None:
        """Never learns."""
