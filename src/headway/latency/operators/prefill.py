"""Attention of one prefill chunk: a(chunk) from an empty cache, b(chunk) for each token that is already cached.

Both are kept as efficiencies against arithmetic (4 FLOPs per row, key, query head and head dimension; a chunk's own
triangle counts half), by head counts and chunk, and interpolated in logarithms: efficiency moves slowly where times
move by orders of magnitude. Beyond the measured chunks the last efficiency goes on. a: the libraries' prompt grids
(batch 1). b: chunk-over-prefix measurements, whose times are linear in the prefix within 2-3%.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headway.hardware.accelerators import accelerator
from headway.latency.operators.curves import Curve, curve
from headway.latency.operators.heads import Heads, name, neighbours
from headway.latency.operators.profiles import Column, Profile


class PrefillFit(msgspec.Struct, frozen=True):
    """`own[source][heads]`: ms by chunk, at past 0, batch 1. `slope[heads]`: ms per 1,000 cached tokens by chunk.
    past: the longest prefix measured."""

    device: str
    head_dim: int
    own: dict[str, dict[str, Curve]]
    slope: dict[str, Curve]
    past: int
    chunk: int

    def own_ms(self, chunk: Column, heads: Heads, source: str) -> Column:
        """Milliseconds of a chunk's attention within itself."""
        measured = self.own[source]
        flops = 2.0 * heads[0] * chunk * (chunk + 1)
        return _scaled(chunk, heads, flops, {key: (c, 1.0) for key, c in measured.items()})

    def slope_ms(self, chunk: Column, heads: Heads) -> Column:
        """Milliseconds for each cached token; by arithmetic alone where nothing measured a prefix on this device."""
        if not self.slope:
            flops = accelerator(self.device).flops * 0.5
            return np.asarray(4e3 * heads[0] * self.head_dim * np.maximum(chunk, 16.0) / flops, dtype=np.float64)
        return _scaled(chunk, heads, heads[0] * chunk, {key: (c, 1e-3) for key, c in self.slope.items()})


def _scaled(chunk: Column, heads: Heads, work: Column, measured: dict[str, tuple[Curve, float]]) -> Column:
    """Measured curves of the nearest heads. A stand-in with other query heads is read at the chunk that gives it the
    same number of row tiles (heads × rows: what fills the machine), and scaled by work."""
    total = np.zeros(chunk.size)
    for key, weight in neighbours(heads, measured):
        c, unit = measured[key]
        q = int(key.split("/")[0])
        at = np.minimum(np.maximum(chunk, 1.0), c.top)
        grown = np.where(chunk > c.top, _growth(chunk, work, c.top), 1.0)
        total += weight * np.log(c(at) * unit * grown * _head_ratio(heads[0], q, c(at), c.ms[0]))
    return np.asarray(np.exp(total), dtype=np.float64)


def _growth(chunk: Column, work: Column, top: float) -> Column:
    """How much more work a chunk is than one of `top` rows: its own work goes by power 1 or 2 in the chunk."""
    power = np.log(np.maximum(work[-1] / work[0], 1.0)) / np.log(np.maximum(chunk[-1] / chunk[0], 1.0 + 1e-9))
    return np.asarray((np.maximum(chunk, 1.0) / top) ** np.round(power), dtype=np.float64)


def _head_ratio(wanted: int, measured: int, ms: Column, floor: float) -> Column:
    """Time by query heads: above the kernel's floor in proportion, at the floor not at all."""
    variable = np.clip(1.0 - floor / np.maximum(ms, floor), 0.0, 1.0)
    return np.asarray(1.0 + variable * (wanted / measured - 1.0), dtype=np.float64)


def fit_prefill(device: str, profiles: Sequence[Profile], tolerance: float = 0.0) -> PrefillFit:
    """Fit the profiles of one die (A800 beside A100, H800 beside H100)."""
    own: dict[str, dict[str, Curve]] = {}
    slopes: dict[str, dict[float, list[tuple[float, float]]]] = {}
    past = chunk = 0
    for p in profiles:
        one = p.where((p.x["batch"] == 1) & (p.x["chunk"] > 0))
        if not len(one):
            continue
        heads = np.stack([one.x["q_heads"], one.x["kv_heads"]], axis=1)
        for q, kv in np.unique(heads, axis=0):
            rows = one.where((heads == (q, kv)).all(axis=1))
            key = name((int(q), int(kv)))
            alone = rows.where(rows.x["past"] == 0)
            if len(alone) > 2:
                own.setdefault(p.source, {})[key] = curve(alone.x["chunk"], alone.ms, tolerance)
                chunk = max(chunk, int(alone.x["chunk"].max()))
            for c in np.unique(rows.x["chunk"][rows.x["past"] > 0]):
                at = rows.where(rows.x["chunk"] == c)
                if np.unique(at.x["past"]).size >= 4 and at.x["past"].max() >= 1024:
                    slopes.setdefault(key, {}).setdefault(float(c), []).append(_line(at.x["past"], at.ms))
                    past = max(past, int(at.x["past"].max()))
    slope: dict[str, Curve] = {}
    for key, chunks in sorted(slopes.items()):
        sizes = np.array(sorted(chunks))
        values = np.array([np.average([s for s, _ in chunks[c]], weights=[w for _, w in chunks[c]]) for c in sizes])
        good = values > 0
        if good.sum() >= 3:
            slope[key] = curve(sizes[good], values[good] * 1e3, max(tolerance, 0.03))
    return PrefillFit(device, 128, own, slope, past, chunk)


def _line(past: Column, ms: Column) -> tuple[float, float]:
    """Slope by past (ms a token) and its weight. Relative residuals; the first tenth, where launches rule, left out."""
    far = past >= 0.1 * past.max()
    x, y = past[far], ms[far]
    a = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    solution, *_ = np.linalg.lstsq(a, np.ones_like(y), rcond=None)
    return float(solution[1]), float(x.size)
