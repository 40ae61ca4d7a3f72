"""Measured times over one size: interpolation, the tile staircase, and thinning to what a data file should hold."""

from __future__ import annotations

import msgspec
import numpy as np

from headway.perf.latency.operators.profiles import Column

TILE = 64
"""Rows after which matrix products start another tile (times step there; 128 is a multiple)."""

UNIT_MS = 1e-4
"""Resolution of stored times: a tenth of a microsecond. Vidur's profiles resolve one microsecond."""

_NOISE_MS = 6e-4
"""Thinning may always move a time by this much: less than the resolution of what was measured."""


class SizeCurve(msgspec.Struct, frozen=True):
    """Values by size: log-log linear between knots, constant below the first, linear beyond the last.

    Beyond the last knot the slope is that of the last octave (fixed cost plus cost per unit of size)."""

    size: tuple[int, ...]
    """Sizes of the knots, ascending."""
    value: tuple[int, ...]
    """Values of the knots in multiples of `unit`."""
    unit: float = UNIT_MS
    """Milliseconds (or another unit) of one step of `value`."""

    def __call__(self, size: Column) -> Column:
        x, y = np.array(self.size, dtype=np.float64), self.values
        inside = np.exp(np.interp(np.log(np.maximum(size, 1e-9)), np.log(x), np.log(y)))
        beyond = size > x[-1]
        if beyond.any() and x.size > 1:
            # First knot of the last octave, but never the last knot itself.
            back = min(int(np.searchsorted(x, x[-1] / 2)), x.size - 2)
            slope = max(0.0, (y[-1] - y[back]) / (x[-1] - x[back]))
            inside = np.where(beyond, y[-1] + slope * (size - x[-1]), inside)
        return np.asarray(inside, dtype=np.float64)

    @property
    def values(self) -> Column:
        return np.array(self.value, dtype=np.float64) * self.unit

    @property
    def top(self) -> int:
        return self.size[-1]


def curve(size: Column, value: Column, tolerance: float = 0.0, steps: bool = False, unit: float = UNIT_MS) -> SizeCurve:
    """Fit a curve through all points.

    steps: between two sizes with a tile's edge between them, time steps at that edge if it grows by more than 4%.
    tolerance: relative error that leaving out knots may cause."""
    order = np.argsort(size)
    x, y = size[order], value[order]
    if steps:
        x, y = _stepped(x, y)
    if tolerance:
        # Values are positive, so relative errors are differences of logarithms.
        keep = _thin(np.log(x), np.log(y), np.maximum(tolerance, _NOISE_MS / y if unit == UNIT_MS else 0.0))
        x, y = x[keep], y[keep]
    return SizeCurve(tuple(round(float(v)) for v in x), tuple(max(1, round(float(v) / unit)) for v in y), unit)


def _stepped(x: Column, y: Column) -> tuple[Column, Column]:
    # First tile edge at or after each size.
    edge = np.ceil(x[:-1] / TILE) * TILE
    # Growth between sizes further apart shows no step; sizes within the first tile cost as much as all of it.
    near = (x[1:] - x[:-1] <= TILE) & ((x[1:] < 1.6 * x[:-1]) | (x[:-1] < TILE))
    at = np.flatnonzero((edge + 1 < x[1:]) & (y[1:] > 1.04 * y[:-1]) & near)
    new_x, new_y = [x], [y]
    for i in at:
        # Constant up to the edge, then the larger size's time from the row after it.
        if edge[i] > x[i]:
            new_x.append(edge[i : i + 1])
            new_y.append(y[i : i + 1])
        new_x.append(edge[i : i + 1] + 1)
        new_y.append(y[i + 1 : i + 2])
    xs, ys = np.concatenate(new_x), np.concatenate(new_y)
    order = np.argsort(xs, kind="stable")
    return xs[order], ys[order]


def _thin(x: Column, y: Column, tolerance: Column) -> list[int]:
    """Return the indices of knots to keep so that linear interpolation is within `tolerance` (Douglas-Peucker)."""
    allowed = np.broadcast_to(tolerance, x.shape)
    keep = {0, x.size - 1}
    spans = [(0, x.size - 1)]
    while spans:
        low, high = spans.pop()
        if high - low < 2:
            continue
        line = y[low] + (y[high] - y[low]) * (x[low:high] - x[low]) / (x[high] - x[low])
        off = np.abs(line - y[low:high]) / allowed[low:high]
        worst = int(np.argmax(off))
        if off[worst] > 1.0:
            keep.add(low + worst)
            spans += [(low, low + worst), (low + worst, high)]
    return sorted(keep)
