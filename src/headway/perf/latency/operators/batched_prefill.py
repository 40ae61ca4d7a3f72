"""Attention of several prompts in one batch, which is less than the sum of each alone.

A short chunk leaves most of the device idle, and the next one fills what it left. The first costs its time alone, each
further one a share of it, its marginal share: a curve over chunk × query heads, the number of tiles, as in `prefill`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headway.perf.latency.operators.curves import Column


class BatchedPrefill(msgspec.Struct, frozen=True):
    """Marginal share of a further prompt in a batch, of one kernel library on one die."""

    log2_tiles: tuple[float, ...]
    """log2(chunk × query heads), ascending."""
    share: tuple[float, ...]
    """Time that a further chunk adds over its time alone; constant beyond both ends."""

    def shares(self, chunk: Column, q_heads: Column | int) -> Column:
        """Return the share of each chunk, non-decreasing in its tokens."""
        return np.interp(np.log2(chunk * q_heads), self.log2_tiles, self.share)

    def batch_ms(self, alone_ms: Column, batch: Column, chunk: Column, q_heads: Column) -> Column:
        """Return the milliseconds of `batch` equal chunks that take `alone_ms` alone (elementwise)."""
        return np.asarray(alone_ms * (1.0 + (batch - 1.0) * self.shares(chunk, q_heads)), dtype=np.float64)
