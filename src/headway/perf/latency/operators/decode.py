"""Attention of decodes, by number of requests and cached tokens of each.

A grid of measured times over (requests, cached tokens each), bilinear in logarithms. Beyond it time grows with the
bytes read, at the bandwidth that large reads reach on the device: efficiency rises with bytes (A100: 0.26 at 10-50 MB,
0.74 beyond 300 MB), so the slope at the end of a small grid must not be used.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headway.perf.hardware.accelerators import accelerator
from headway.perf.latency.operators.heads import Heads, name, neighbours
from headway.perf.latency.operators.profiles import Column, OperatorProfile

LARGE_BYTES = 3e8
"""KV bytes from which on a read reaches the device's bandwidth for large reads."""
_DEFAULT_TAIL = 0.8


class DecodeGrid(msgspec.Struct, frozen=True):
    """Measured times of one source and head count."""

    counts: tuple[int, ...]
    """Numbers of requests, ascending."""
    past: tuple[int, ...]
    """Cached tokens of each request, ascending."""
    ms: tuple[tuple[float, ...], ...]
    """`ms[i][j]`: counts[i] requests of past[j] cached tokens each."""


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

    def ms(self, count: Column, past: Column, heads: Heads, source: str) -> Column:
        """Return the milliseconds of `count` requests with `past` cached tokens each (elementwise over both)."""
        measured = self.grids[source]
        # A stand-in is read at the count that gives it as many KV heads in all: the same bytes, the same tiles.
        total = np.zeros(count.size)
        for key, weight in neighbours(heads, measured):
            kv = int(key.split("/")[1])
            total += weight * np.log(self._inside(measured[key], count * (heads[1] / kv), past, kv, source))
        return np.asarray(np.exp(total), dtype=np.float64)

    def _inside(self, grid: DecodeGrid, count: Column, past: Column, kv: int, source: str) -> Column:
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
        # Keys and values of 2 bytes each.
        bytes_a_token = 4.0 * kv * self.head_dim
        moved = np.outer(grid.counts, grid.past) * bytes_a_token
        large = moved > LARGE_BYTES
        rates = (moved / np.exp(table))[large] * 1e3
        # This grid's own rate where it has enough large reads, else the source's.
        speed = float(np.quantile(rates, 0.75)) if rates.size > 4 else self.speed(source)
        # KV tokens beyond the grid's edge.
        more = np.exp(c) * (np.exp(p) - 1) - np.exp(cc) * (np.exp(pp) - 1)
        return np.asarray(time + np.maximum(more, 0.0) * bytes_a_token * 1e3 / speed, dtype=np.float64)

    def speed(self, source: str) -> float:
        """Return the bytes/s at which a source's kernels read long histories."""
        return accelerator(self.device).bandwidth * self.tails[source]


def fit_decode(device: str, profiles: Sequence[OperatorProfile]) -> DecodeFit:
    """Fit grids by source and heads.

    Cells of a grid that were not measured (they did not fit the memory) are extrapolated from the last measured cell of
    their row or column by bytes at the tail bandwidth, so that a look-up needs no case for them."""
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
    # Above 0.95 the byte count must be too high (Frontier's 405B profile holds FP8 KV): cap.
    tails = {s: round(min(float(np.median(r)) if r else _DEFAULT_TAIL, 0.95), 4) for s, r in sorted(large.items())}
    grids: dict[str, dict[str, DecodeGrid]] = {}
    for source, by_heads in sorted(cells.items()):
        for heads, times in sorted(by_heads.items()):
            counts, past_ = sorted({b for b, _ in times}), sorted({p for _, p in times})
            if len(counts) < 2 or len(past_) < 2:
                continue
            byte_ms = 4.0 * heads[1] * 128 * 1e3 / (own.bandwidth * tails[source])
            table = _filled(counts, past_, times, byte_ms)
            rows = tuple(tuple(float(f"{v:.4g}") for v in row) for row in table)
            grids.setdefault(source, {})[name(heads)] = DecodeGrid(tuple(counts), tuple(past_), rows)
    return DecodeFit(device, 128, grids, {source: tails[source] for source in grids})


def _filled(
    counts: list[int], past: list[int], times: dict[tuple[int, int], float], byte_ms: float
) -> list[list[float]]:
    table = [[times.get((b, p), np.nan) for p in past] for b in counts]
    for i, b in enumerate(counts):
        for j, p in enumerate(past):
            if not np.isnan(table[i][j]):
                continue
            # From the cell before in the column and in the row, filled or measured: their mean.
            options = []
            if i and not np.isnan(table[i - 1][j]):
                options.append(table[i - 1][j] + (b - counts[i - 1]) * p * byte_ms)
            if j and not np.isnan(table[i][j - 1]):
                options.append(table[i][j - 1] + b * (p - past[j - 1]) * byte_ms)
            table[i][j] = float(np.mean(options)) if options else np.nan
    # Cells with neither (at the table's start): the nearest measured cell of the row.
    for i in range(len(counts)):
        row = np.array(table[i])
        if np.isnan(row).any() and not np.isnan(row).all():
            good = np.flatnonzero(~np.isnan(row))
            table[i] = [float(row[good[np.argmin(np.abs(good - j))]]) for j in range(row.size)]
    return table
