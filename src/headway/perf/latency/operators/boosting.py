"""A small gradient-boosted regressor of symmetric trees, for the residual of a roofline.

All nodes of one depth share one split (feature, threshold), so a tree is a few comparisons and a table of leaves:
compact enough to ship as JSON, and evaluated as vectors without any library. Outside its fitted range the residual is
constant, so the corrected roofline extrapolates by its own law. Deterministic: no sampling.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from headway.perf.latency.operators.curves import Column

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
