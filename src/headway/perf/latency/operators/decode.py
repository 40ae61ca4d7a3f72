"""Attention of decodes, by number of requests and cached tokens of each.

A grid of measured times over (requests, cached tokens each), bilinear in logarithms. Beyond it time grows with the
bytes read, from the bandwidth that the kernel reaches at the grid's edge: a single request of few KV heads reads at a
fraction of what a full batch does, however long its history. How that bandwidth still rises with bytes (A100: a share
of 0.26 at 10-50 MB, 0.74 beyond 300 MB) is the median over all grids of the source. The slope at the edge is not used:
kernels change how they split a history in steps, and one step would be carried on for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from headway.perf.hardware.accelerators import accelerator
from headway.perf.latency.operators.heads import Heads, name, neighbours
from headway.perf.latency.operators.profiles import Column, OperatorProfile

LARGE_BYTES = 3e8
"""KV bytes from which on a read reaches the device's bandwidth for large reads."""
_DEFAULT_TAIL = 0.8
_HEAD_DIM = 128
_MOST_EFFICIENT = 0.95
"""Largest share of peak bandwidth that is extrapolated to. A greater one measured means that bytes are miscounted
(Frontier's 405B profile holds FP8 KV)."""
_SHORT_PAST = 1000
"""Histories below this say more about a kernel's start than about its bandwidth."""


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
        factor = _longer(edge, wanted, time, kv * self.head_dim, bandwidth, self.growth[source])
        return np.asarray(time * factor, dtype=np.float64)

    def speed(self, source: str) -> float:
        """Return the bytes/s at which a source's kernels read long histories."""
        return accelerator(self.device).bandwidth * self.tails[source]


def _longer(
    tokens: Column, wanted: Column, ms: Column, width: int, bandwidth: float, growth: BandwidthGrowth
) -> Column:
    """Return the factor by which `wanted` KV tokens take longer than `tokens`, which take `ms` (elementwise).

    width: elements of a token's keys. bandwidth: the device's peak, bytes/s, which the rise of the bandwidth reached
    stays below."""
    token_bytes = 4.0 * width  # keys and values of 2 bytes each
    reached = tokens * token_bytes / (ms * 1e-3 * bandwidth)
    gain = growth(wanted * token_bytes) - growth(tokens * token_bytes)
    most = np.maximum(np.log(_MOST_EFFICIENT / reached), 0.0)
    return np.asarray(wanted / tokens * np.exp(-np.minimum(gain, most)), dtype=np.float64)


def fit_decode(device: str, profiles: Sequence[OperatorProfile]) -> DecodeFit:
    """Fit grids by source and heads.

    Cells of a grid that were not measured (they did not fit the memory) are extrapolated from the last measured cell of
    their row or column as reads beyond the grid are, so that a look-up needs no case for them."""
    own = accelerator(device)
    large: dict[str, list[float]] = {}
    cells: dict[str, dict[Heads, dict[tuple[int, int], float]]] = {}
    for p in profiles:
        moved = 4.0 * p.x["batch"] * p.x["past"] * p.x["kv_heads"] * p.x["head_dim"]
        # Where a profile reaches far enough, only reads of 4 × LARGE_BYTES count: efficiency still rises below.
        most = moved > (LARGE_BYTES if moved.max() < 4 * LARGE_BYTES else 4 * LARGE_BYTES)
        large.setdefault(p.source, []).extend(moved[most] / (p.ms[most] * 1e-3) / own.bandwidth)
        for b, past, q, kv, ms in zip(p.x["batch"], p.x["past"], p.x["q_heads"], p.x["kv_heads"], p.ms, strict=True):
            cells.setdefault(p.source, {}).setdefault((int(q), int(kv)), {})[int(b), int(past)] = float(ms)
    tails = {
        s: round(min(float(np.median(r)) if r else _DEFAULT_TAIL, _MOST_EFFICIENT), 4) for s, r in sorted(large.items())
    }
    grids: dict[str, dict[str, DecodeGrid]] = {}
    growth: dict[str, BandwidthGrowth] = {}
    for source, by_heads in sorted(cells.items()):
        growth[source] = _growth(by_heads, tails[source] * own.bandwidth)
        for heads, times in sorted(by_heads.items()):
            counts, past_ = sorted({b for b, _ in times}), sorted({p for _, p in times})
            if len(counts) < 2 or len(past_) < 2:
                continue
            table = _filled(counts, past_, times, heads[1] * _HEAD_DIM, own.bandwidth, growth[source])
            rows = tuple(tuple(float(f"{v:.4g}") for v in row) for row in table)
            grids.setdefault(source, {})[name(heads)] = DecodeGrid(tuple(counts), tuple(past_), rows)
    kept = {source: tails[source] for source in grids}
    return DecodeFit(device, _HEAD_DIM, grids, kept, {source: growth[source] for source in grids})


def _growth(by_heads: Mapping[Heads, Mapping[tuple[int, int], float]], tail: float) -> BandwidthGrowth:
    """Return how bandwidth rises with bytes: the median, by octave of bytes, over neighbouring histories of all rows.

    tail: bytes/s of large reads, reached at `LARGE_BYTES` where no measurement goes so far."""
    rises: dict[int, list[float]] = {}
    speeds: dict[int, list[float]] = {}
    for heads, times in by_heads.items():
        token_bytes = 4.0 * heads[1] * _HEAD_DIM
        for count in {b for b, _ in times}:
            row = sorted((past, ms) for (b, past), ms in times.items() if b == count and past >= _SHORT_PAST)
            for (past, ms), (longer, longer_ms) in pairwise(row):
                at = round(float(np.log2(count * past * token_bytes)))
                octaves = np.log2(longer / past)
                rises.setdefault(at, []).append(float(np.log(longer / past * ms / longer_ms) / octaves))
                speeds.setdefault(at, []).append(count * longer * token_bytes / (longer_ms * 1e-3))
    top = float(np.log2(LARGE_BYTES))
    if not rises:
        return BandwidthGrowth((top,), (0.0,))
    sizes, gain = [float(min(rises))], [0.0]
    for at in sorted(rises):
        sizes.append(at + 1.0)
        gain.append(round(gain[-1] + max(float(np.median(rises[at])), 0.0), 4))
    if sizes[-1] < top:
        gain.append(round(gain[-1] + max(float(np.log(tail / np.median(speeds[max(speeds)]))), 0.0), 4))
        sizes.append(round(top, 4))
    return BandwidthGrowth(tuple(sizes), tuple(gain))


def _filled(
    counts: list[int],
    past: list[int],
    times: Mapping[tuple[int, int], float],
    width: int,
    bandwidth: float,
    growth: BandwidthGrowth,
) -> list[list[float]]:
    table = [[times.get((b, p), np.nan) for p in past] for b in counts]
    for i, b in enumerate(counts):
        for j, p in enumerate(past):
            if not np.isnan(table[i][j]):
                continue
            # From the cell before in the column and in the row, filled or measured: their mean.
            before = [(table[i - 1][j], counts[i - 1] * p)] if i else []
            before += [(table[i][j - 1], b * past[j - 1])] if j else []
            options = []
            for ms, tokens in before:
                if not np.isnan(ms):
                    ends = np.array([float(max(tokens, 1))]), np.array([float(max(b * p, 1))]), np.array([ms])
                    options.append(ms * float(_longer(*ends, width, bandwidth, growth)[0]))
            table[i][j] = float(np.mean(options)) if options else np.nan
    # Cells with neither (at the table's start): the nearest measured cell of the row.
    for i in range(len(counts)):
        row = np.array(table[i])
        if np.isnan(row).any() and not np.isnan(row).all():
            good = np.flatnonzero(~np.isnan(row))
            table[i] = [float(row[good[np.argmin(np.abs(good - j))]]) for j in range(row.size)]
    return table
