"""Measured times over one size, interpolated."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]

UNIT_MS = 1e-4
"""Resolution of stored times: a tenth of a microsecond. Vidur's profiles resolve one microsecond."""


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
