"""Measured times over one size: interpolation, the tile staircase, and thinning to what a data file should hold."""

from __future__ import annotations

import msgspec
import numpy as np

from headway.latency.operators.profiles import Column

TILE = 64
"""Rows after which matrix products start another tile (times step there; 128 is a multiple)."""


class Curve(msgspec.Struct, frozen=True):
    """Milliseconds by size, ascending. Between knots log-log linear; below the first flat; above the last one
    proportional to the slope of the last octave (what fixed and per-size cost make of it)."""

    size: tuple[float, ...]
    ms: tuple[float, ...]

    def __call__(self, size: Column) -> Column:
        x, y = np.array(self.size), np.array(self.ms)
        inside = np.exp(np.interp(np.log(np.maximum(size, 1e-9)), np.log(x), np.log(y)))
        beyond = size > x[-1]
        if beyond.any():
            back = np.searchsorted(x, x[-1] / 2)
            back = min(int(back), x.size - 2) if x.size > 1 else 0
            slope = max(0.0, (y[-1] - y[back]) / (x[-1] - x[back])) if x.size > 1 else y[-1] / x[-1]
            inside = np.where(beyond, y[-1] + slope * (size - x[-1]), inside)
        return np.asarray(inside, dtype=np.float64)

    @property
    def top(self) -> float:
        return self.size[-1]


def curve(size: Column, ms: Column, tolerance: float = 0.0, steps: bool = False) -> Curve:
    """Fit through all points. `steps`: between two sizes with a tile's edge between them, the time steps at that
    edge if it grows by more than 4%. `tolerance`: relative error that leaving knots out may cause."""
    order = np.argsort(size)
    x, y = size[order], ms[order]
    if steps:
        x, y = _stepped(x, y)
    if tolerance:
        keep = _thin(np.log(x), np.log(y), tolerance)
        x, y = x[keep], y[keep]
    return Curve(tuple(float(v) for v in x), tuple(float(f"{v:.4g}") for v in y))


def _stepped(x: Column, y: Column) -> tuple[Column, Column]:
    edge = np.floor(x[:-1] / TILE) * TILE
    edge = np.where(edge < x[:-1], edge + TILE, edge)
    at = np.flatnonzero((edge + 1 < x[1:]) & (y[1:] > 1.04 * y[:-1]) & (x[1:] - x[:-1] <= TILE))
    new_x, new_y = [x], [y]
    for i in at:
        if edge[i] > x[i]:
            new_x.append(np.array([edge[i]]))
            new_y.append(y[i : i + 1])
        new_x.append(np.array([edge[i] + 1]))
        new_y.append(y[i + 1 : i + 2])
    xs, ys = np.concatenate(new_x), np.concatenate(new_y)
    order = np.argsort(xs, kind="stable")
    return xs[order], ys[order]


def _thin(x: Column, y: Column, tolerance: float) -> list[int]:
    """Indices of knots to keep, so that linear interpolation is within `tolerance` everywhere (Douglas-Peucker)."""
    keep = {0, x.size - 1}
    spans = [(0, x.size - 1)]
    while spans:
        low, high = spans.pop()
        if high - low < 2:
            continue
        line = y[low] + (y[high] - y[low]) * (x[low:high] - x[low]) / (x[high] - x[low])
        off = np.abs(line - y[low:high])
        worst = int(np.argmax(off))
        if off[worst] > tolerance:
            keep.add(low + worst)
            spans += [(low, low + worst), (low + worst, high)]
    return sorted(keep)
