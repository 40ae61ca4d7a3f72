"""Measured times interpolated over one size or over head counts, and a small boosted regressor for what remains."""

from __future__ import annotations

import math
from collections.abc import Iterable

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


Heads = tuple[int, int]
"""(query heads, KV heads) of one rank."""


def parse(key: str) -> Heads:
    """Return the heads of a key such as "32/8"."""
    q, kv = key.split("/")
    return int(q), int(kv)


def name(heads: Heads) -> str:
    """Return the key of head counts, such as "32/8"."""
    return f"{heads[0]}/{heads[1]}"


def neighbours(wanted: Heads, measured: Iterable[str], most: int = 3) -> list[tuple[str, float]]:
    """Return up to `most` nearest measured head counts with weights that sum to 1; an exact match has weight 1.

    Weights are inverse squared distances, in octaves of query heads and (counting double) of the group size, the query
    heads per KV head."""
    found: list[tuple[float, str]] = []
    for key in measured:
        q, kv = parse(key)
        here = math.log2(wanted[0] / q)
        group = math.log2((wanted[0] / wanted[1]) / (q / kv))
        # Multi-head attention runs other kernels than grouped-query attention: three octaves apart.
        split = (wanted[0] == wanted[1]) != (q == kv)
        distance = here * here + 2 * group * group + (9.0 if split else 0.0)
        if distance == 0:
            return [(key, 1.0)]
        found.append((distance, key))
    found.sort()
    near = found[:most]
    total = sum(1 / d for d, _ in near)
    return [(key, 1 / d / total) for d, key in near]


# A small gradient-boosted regressor of symmetric trees, for the residual of a roofline.
#
# All nodes of one depth share one split (feature, threshold), so a tree is a few comparisons and a table of leaves:
# compact enough to ship as JSON, and evaluated as vectors without any library. Outside its fitted range the residual is
# constant, so the corrected roofline extrapolates by its own law. Deterministic: no sampling.

Matrix = npt.NDArray[np.float64]


class BoostedTrees(msgspec.Struct, frozen=True):
    """Sum of symmetric trees."""

    features: tuple[str, ...]
    """Names of the columns of x."""
    cuts: tuple[tuple[float, ...], ...]
    """`cuts[feature]`: thresholds of that feature, ascending."""
    questions: tuple[tuple[tuple[int, int], ...], ...]
    """`questions[tree][depth]`: (feature, index into its cuts) of the split at that depth."""
    leaves: tuple[tuple[int, ...], ...]
    """`leaves[tree][bits]` in units of 1e-4; bits of `x[feature] > cut`, the first split's most significant."""

    def __call__(self, x: Matrix) -> Column:
        """Return the predicted residual of each row of `x` (rows × features)."""
        total = np.zeros(x.shape[0])
        for asked, leaves in zip(self.questions, self.leaves, strict=True):
            node = np.zeros(x.shape[0], dtype=np.int64)
            for feature, cut in asked:
                node = 2 * node + (x[:, feature] > self.cuts[feature][cut])
            total += np.array(leaves, dtype=np.float64)[node]
        return total * 1e-4
