"""Attention of several prompts in one batch, which is less than the sum of each alone.

A short chunk leaves most of the device idle, and the next one fills what it left. The first costs its time alone, each
further one a share of it, its marginal share: a curve over chunk × query heads, the number of tiles, as in `prefill`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headway.perf.latency.operators.profiles import PREFILL, Column, OperatorProfile


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


def batched_rows(profile: OperatorProfile) -> tuple[OperatorProfile, Column]:
    """Return the rows of several prompts whose single prompt was measured too, and its milliseconds alone."""
    x = profile.x
    keys = list(zip(x["q_heads"], x["kv_heads"], x["chunk"], x["past"], strict=True))
    alone = {key: ms for key, batch, ms in zip(keys, x["batch"], profile.ms, strict=True) if batch == 1}
    keep = np.array([b > 1 and key in alone for key, b in zip(keys, x["batch"], strict=True)], dtype=np.bool_)
    return profile.where(keep), np.array([alone[key] for key, kept in zip(keys, keep, strict=True) if kept])


def fit_batched_prefill(profiles: Sequence[OperatorProfile]) -> BatchedPrefill | None:
    """Fit one library's profiles: the median by half octaves of tiles, made monotone (more tiles leave less idle); None
    where no batch was measured."""
    tiles: list[float] = []
    shares: list[float] = []
    for profile in profiles:
        if profile.family != PREFILL:
            continue
        rows, alone = batched_rows(profile)
        tiles.extend(np.round(2 * np.log2(rows.x["chunk"] * rows.x["q_heads"])) / 2)
        shares.extend((rows.ms - alone) / ((rows.x["batch"] - 1) * alone))
    if not tiles:
        return None
    at, found = np.array(tiles), np.array(shares)
    knots = np.unique(at)
    middle = np.maximum.accumulate([max(float(np.median(found[at == knot])), 0.0) for knot in knots])
    return BatchedPrefill(tuple(float(knot) for knot in knots), tuple(round(float(share), 4) for share in middle))
