"""Attention of decodes, by number of requests and cached tokens of each.

A grid of measured times over (requests, cached tokens each), bilinear in logarithms. Beyond it time grows with the
bytes read, from the bandwidth that the kernel reaches at the grid's edge: a single request of few KV heads reads at a
fraction of what a full batch does, however long its history. How that bandwidth still rises with bytes (A100: a share
of 0.26 at 10-50 MB, 0.74 beyond 300 MB) is the median over all grids of the source. The slope at the edge is not used:
kernels change how they split a history in steps, and one step would be carried on for ever.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headway.perf.hardware.accelerators import accelerator
from headway.perf.latency.operators.curves import Column
from headway.perf.latency.operators.heads import Heads, neighbours

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
        factor = longer_reads(edge, wanted, time, kv * self.head_dim, bandwidth, self.growth[source])
        return np.asarray(time * factor, dtype=np.float64)

    def speed(self, source: str) -> float:
        """Return the bytes/s at which a source's kernels read long histories."""
        return accelerator(self.device).bandwidth * self.tails[source]


def longer_reads(
    tokens: Column, wanted: Column, ms: Column, width: int, bandwidth: float, growth: BandwidthGrowth
) -> Column:
    """Return the factor by which `wanted` KV tokens take longer than `tokens`, which take `ms` (elementwise).

    width: elements of a token's keys. bandwidth: the device's peak, bytes/s, which the rise of the bandwidth reached
    stays below."""
    token_bytes = 4.0 * width  # keys and values of 2 bytes each
    reached = tokens * token_bytes / (ms * 1e-3 * bandwidth)
    gain = growth(wanted * token_bytes) - growth(tokens * token_bytes)
    most = np.maximum(np.log(MOST_EFFICIENT / reached), 0.0)
    return np.asarray(wanted / tokens * np.exp(-np.minimum(gain, most)), dtype=np.float64)
