"""Attention of one prefill chunk: a(chunk) from an empty cache, and b(chunk) for each cached token.

a is stored by head counts and chunk, as measured (batch 1), and interpolated as a factor on floor + arithmetic + one
tile's walk over the chunk, in logarithms: the factor changes slowly where times change by orders of magnitude. Beyond
the measured chunks time continues as a parabola (`_tail`).

b is one curve over rows × query heads, the number of tiles that fill the device: in the profiles it is the same for
16 heads with 512 rows, 64 with 128 and 128 with 64 (H800, within 2%). Below a full device it is flat, because one tile
walks the whole cache alone; kernels that split KV are not bound by this (`split_ms`). Times are linear in the cached
tokens within 2-3% up to 4× beyond the fitted range; no public profile goes further.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headway.perf.hardware.accelerators import accelerator
from headway.perf.latency.operators.batched_prefill import BatchedPrefill
from headway.perf.latency.operators.curves import Column, SizeCurve
from headway.perf.latency.operators.heads import Heads, name, neighbours

HEAD_DIM = 128
_COMPUTE = 0.6
_WALK_BYTES = 2e4
"""Time of a tile's walk over one token, as bytes at the device's bandwidth (10 ns on an A100), as measured."""
_SPLIT_ROWS = 64


class PrefillFit(msgspec.Struct, frozen=True):
    """Prefill attention of one die, by source (kernel library) and head counts."""

    device: str
    """Name of the die."""
    own: dict[str, dict[str, SizeCurve]]
    """`own[source][heads]`: ms by chunk, at past 0, batch 1."""
    over: dict[str, dict[str, tuple[SizeCurve, SizeCurve]]]
    """`over[source][heads]`: (ms over an empty prefix, ns for each cached token) by chunk, of the heads measured."""
    slope: SizeCurve | None
    """ns for each cached token by rows × query heads, over all sources and heads."""
    best: float
    """FLOP/s that the slope reaches on a full device."""
    past: int
    """Longest prefix measured, in tokens."""
    chunk: int
    """Longest chunk measured, in tokens."""
    batched: BatchedPrefill | None = None
    """Several prompts in a batch, of the preferred library; None where that was not measured."""

    def own_ms(self, chunk: Column, heads: Heads, source: str) -> Column:
        """Return the milliseconds of a chunk's attention within itself."""
        measured = self.own[source]
        factor = np.zeros(chunk.size)
        floor = 0.0
        for key, weight in neighbours(heads, measured):
            part, low = self._factor(chunk, measured[key], int(key.split("/")[0]))
            factor += weight * part
            floor += weight * low
        return np.asarray(np.exp(factor) * (floor + _work_ms(self.device, chunk, heads[0])), dtype=np.float64)

    def _factor(self, chunk: Column, measured: SizeCurve, q_heads: int) -> tuple[Column, float]:
        """Return (logarithm of time over floor + work, that floor).

        Beyond the last measured chunk time grows as the parabola through the last two octaves does."""
        at, ms = np.array(measured.size, dtype=np.float64), measured.values
        low = float(ms.min())
        base = low + _work_ms(self.device, chunk, q_heads)
        logs = np.log(ms / (low + _work_ms(self.device, at, q_heads)))
        time = np.exp(np.interp(np.log(np.maximum(chunk, 1.0)), np.log(at), logs)) * base
        if (chunk > at[-1]).any():
            linear, square = _tail(at, ms)
            time = np.where(
                chunk > at[-1], ms[-1] + linear * (chunk - at[-1]) + square * (chunk**2 - at[-1] ** 2), time
            )
        return np.asarray(np.log(time / base), dtype=np.float64), low

    def prefix_ms(self, chunk: Column, heads: Heads, source: str) -> Column:
        """Return the milliseconds that any prefix adds to a chunk (another kernel, or its set-up); 0 if not measured.

        Below the least chunk measured over a prefix, time shrinks in proportion to the chunk's attention within itself.
        """
        found = self.over.get(source, {}).get(name(heads))
        if found is None:
            return np.zeros(chunk.size)
        own, least = self.own_ms(chunk, heads, source), np.array([float(found[0].size[0])])
        smaller = np.where(chunk < least, own / self.own_ms(least, heads, source), 1.0)
        return np.maximum(found[0](np.maximum(chunk, 1.0)) * smaller - own, 0.0)

    def slope_ms(self, chunk: Column, heads: Heads, source: str = "") -> Column:
        """Return the milliseconds for each cached token.

        Of these heads and this source where measured, else of all by number of tiles; by arithmetic where no profile
        has a prefix."""
        # 1e-6: curves hold ns. Beyond their last knot the slope is proportional to the rows.
        found = self.over.get(source, {}).get(name(heads))
        if found is not None:
            top = found[1].top
            return np.asarray(
                found[1](np.clip(chunk, 1.0, top)) * 1e-6 * np.maximum(chunk / top, 1.0), dtype=np.float64
            )
        work = np.maximum(chunk, 1.0) * heads[0]
        if self.slope is None:
            return 4e3 * work * HEAD_DIM / self.best
        top = self.slope.top
        grown = np.maximum(work / top, 1.0)
        return np.asarray(self.slope(np.minimum(work, top)) * 1e-6 * grown, dtype=np.float64)

    def split_ms(self, chunk: Column, heads: Heads, bandwidth: float) -> Column:
        """Return `slope_ms` of kernels that split KV over the whole device (FlashInfer, FlashAttention; Medha §4.2).

        The larger of arithmetic of whole 64-row tiles a KV head at the best measured rate, and of reading KV at
        `bandwidth` bytes/s; at most the measured slope."""
        rows = np.ceil(np.maximum(chunk, 1.0) * heads[0] / heads[1] / _SPLIT_ROWS) * _SPLIT_ROWS
        arithmetic = 4e3 * rows * heads[1] * HEAD_DIM / self.best
        reading = 4e3 * heads[1] * HEAD_DIM / bandwidth
        return np.asarray(np.minimum(np.maximum(arithmetic, reading), self.slope_ms(chunk, heads)), dtype=np.float64)


def _tail(at: Column, ms: Column) -> tuple[float, float]:
    """Return (ms a token, ms a token squared) over the last two octaves: relative least squares, no negative term."""
    # The last two octaves, and at least the last four points.
    last = at >= min(at[-1] / 4, at[max(at.size - 4, 0)])
    x, y = at[last], ms[last]
    # The first set of powers whose solution has no negative slope and leaves a point over.
    for powers in ((0, 1, 2), (0, 2), (1, 2)):
        a = np.stack([x**p for p in powers], axis=1)
        scale = a.max(axis=0)
        found, *_ = np.linalg.lstsq(a / scale / y[:, None], np.ones_like(y), rcond=None)
        terms = dict(zip(powers, found / scale, strict=True))
        if terms[2] > 0 and terms.get(1, 0.0) >= 0 and len(x) > len(powers):
            return float(terms.get(1, 0.0)), float(terms[2])
    return 0.0, float(ms[-1] / at[-1] ** 2)


def _work_ms(device: str, chunk: Column, q_heads: int) -> Column:
    """Return the milliseconds of all tiles' arithmetic plus the last tile's walk over the chunk.

    The walk dominates when few heads leave the device idle."""
    # 4 FLOPs a head dimension and pair, chunk·(chunk + 1)/2 pairs, in milliseconds.
    own = accelerator(device)
    arithmetic = 2e3 * q_heads * HEAD_DIM * chunk * (chunk + 1) / (own.flops * _COMPUTE)
    return np.asarray(arithmetic + 1e3 * _WALK_BYTES * chunk / own.bandwidth, dtype=np.float64)
