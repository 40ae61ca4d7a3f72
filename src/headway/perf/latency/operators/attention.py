"""Fitted times of attention: of prefill chunks, of decodes, and of several prompts in one batch.

Beyond the measured chunks time continues as a parabola (`_tail`).

b is one curve over rows × query heads, the number of tiles that fill the device: in the profiles it is the same for 16
heads with 512 rows, 64 with 128 and 128 with 64 (H800, within 2%). Below a full device it is flat, because one tile
walks the whole cache alone; kernels that split KV are not bound by this (`split_ms`). Times are linear in the cached
tokens within 2-3% up to 4× beyond the fitted range; no public profile goes further.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headway.perf.hardware import accelerator
from headway.perf.latency.operators.curves import Column, Heads, SizeCurve, name, neighbours

# Attention of decodes, by number of requests and cached tokens of each.
#
# A grid of measured times over (requests, cached tokens each), bilinear in logarithms. Beyond it time grows with the
# bytes read, from the bandwidth that the kernel reaches at the grid's edge: a single request of few KV heads reads at a
# fraction of what a full batch does, however long its history. How that bandwidth still rises with bytes (A100: a share
# of 0.26 at 10-50 MB, 0.74 beyond 300 MB) is the median over all grids of the source. The slope at the edge is not
# used: kernels change how they split a history in steps, and one step would be carried on for ever.

MOST_EFFICIENT = 0.95
"""Largest share of peak bandwidth that is extrapolated to. A greater one measured means that bytes are miscounted
(Frontier's 405B profile holds FP8 KV)."""


class DecodeGrid(msgspec.Struct, frozen=True):
    """Measured times of one source and head count."""

    counts: tuple[int, ...]
    """Numbers of requests, ascending."""
    past: tuple[int, ...]
    """Cached tokens of each request, ascending."""
    ms: tuple[tuple[float, ...], ...]
    """`ms[i][j]`: counts[i] requests of past[j] cached tokens each."""


class BandwidthGrowth(msgspec.Struct, frozen=True):
    """How the bandwidth that a source's kernels reach rises with the bytes of a read."""

    log2_bytes: tuple[float, ...]
    """Bytes of KV in a read, as base-2 logarithms, ascending."""
    gain: tuple[float, ...]
    """Natural logarithm of the bandwidth relative to that at the first entry; constant beyond both ends."""

    def __call__(self, moved: Column) -> Column:
        return np.asarray(np.interp(np.log2(np.maximum(moved, 1.0)), self.log2_bytes, self.gain), dtype=np.float64)


class DecodeFit(msgspec.Struct, frozen=True):
    """Decode attention of one die, by source (kernel library) and head counts."""

    device: str
    """Name of the die."""
    head_dim: int
    """Head dimension that the grids hold for."""
    grids: dict[str, dict[str, DecodeGrid]]
    """`grids[source][heads]`."""
    tails: dict[str, float]
    """`tails[source]`: share of peak bandwidth that large reads reach. Per source, because kernels differ: on H100
    vLLM's reach 0.93 and those of Frontier's profile 0.50."""
    growth: dict[str, BandwidthGrowth]
    """`growth[source]`: for reads larger than those of a grid."""
    cached: dict[str, float] = {}
    """`cached[source]`: most bytes that are read from a cache, faster than the memory can (L40S: 96 MB, at twice the
    memory's bandwidth); none: no such read was measured."""

    def ms(self, count: Column, past: Column, heads: Heads, source: str) -> Column:
        """Return the milliseconds of `count` requests with `past` cached tokens each (elementwise over both)."""
        measured = self.grids[source]
        # A stand-in is read at the count that gives it as many KV heads in all: the same bytes, the same tiles.
        total = np.zeros(count.size)
        for key, weight in neighbours(heads, measured):
            kv = int(key.split("/")[1])
            total += weight * np.log(self._grid_ms(measured[key], count * (heads[1] / kv), past, kv, source))
        return np.asarray(np.exp(total), dtype=np.float64)

    def _grid_ms(self, grid: DecodeGrid, count: Column, past: Column, kv: int, source: str) -> Column:
        # past + 1: the logarithm of an empty history is 0.
        table = np.log(np.array(grid.ms))
        lc, lp = np.log(np.array(grid.counts, dtype=np.float64)), np.log(np.array(grid.past, dtype=np.float64) + 1)
        c, p = np.log(np.maximum(count, 1.0)), np.log(past + 1)
        cc, pp = np.clip(c, lc[0], lc[-1]), np.clip(p, lp[0], lp[-1])
        i = np.clip(np.searchsorted(lc, cc, side="right") - 1, 0, max(lc.size - 2, 0))
        j = np.clip(np.searchsorted(lp, pp, side="right") - 1, 0, max(lp.size - 2, 0))
        u = (cc - lc[i]) / (lc[i + 1] - lc[i])
        v = (pp - lp[j]) / (lp[j + 1] - lp[j])
        time = np.exp(
            (1 - u) * ((1 - v) * table[i, j] + v * table[i, j + 1])
            + u * ((1 - v) * table[i + 1, j] + v * table[i + 1, j + 1])
        )
        # Outside: at the nearest edge, and from there by bytes.
        inside = np.maximum(np.exp(pp) - 1, 1.0)
        edge, wanted = np.exp(cc) * inside, np.exp(c) * np.maximum(np.exp(p) - 1, inside)
        bandwidth = accelerator(self.device).bandwidth
        cached = self.cached.get(source, 0.0)
        time = time * longer_reads(edge, wanted, time, kv * self.head_dim, bandwidth, self.growth[source], cached)
        # A read that outgrows the cache comes from memory, all of it: the cache's speed does not go on.
        token_bytes = 4.0 * kv * self.head_dim
        leaves = (edge * token_bytes <= cached) & (cached < wanted * token_bytes)
        memory_ms = wanted * token_bytes / self.speed(source) * 1e3
        return np.asarray(np.where(leaves, np.maximum(time, memory_ms), time), dtype=np.float64)

    def speed(self, source: str) -> float:
        """Return the bytes/s at which a source's kernels read long histories."""
        return accelerator(self.device).bandwidth * self.tails[source]


def longer_reads(
    tokens: Column,
    wanted: Column,
    ms: Column,
    width: int,
    bandwidth: float,
    growth: BandwidthGrowth,
    cached: float = 0.0,
) -> Column:
    """Return the factor by which `wanted` KV tokens take longer than `tokens`, which take `ms` (elementwise).

    width: elements of a token's keys. bandwidth: the device's peak, bytes/s, which the rise of the bandwidth reached
    stays below, but for reads of at most `cached` bytes."""
    token_bytes = 4.0 * width  # keys and values of 2 bytes each
    reached = tokens * token_bytes / (ms * 1e-3 * bandwidth)
    gain = growth(wanted * token_bytes) - growth(tokens * token_bytes)
    most = np.where(wanted * token_bytes <= cached, np.inf, np.maximum(np.log(MOST_EFFICIENT / reached), 0.0))
    return np.asarray(wanted / tokens * np.exp(-np.minimum(gain, most)), dtype=np.float64)


# Attention of several prompts in one batch, which is less than the sum of each alone.
#
# A short chunk leaves most of the device idle, and the next one fills what it left. The first costs its time alone,
# each further one a share of it, its marginal share: a curve over chunk × query heads, the number of tiles, as in
# `prefill`.


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
