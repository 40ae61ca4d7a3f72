"""A small gradient-boosted regressor of symmetric trees, for the residual of a roofline.

All nodes of one depth share one split (feature, threshold), so a tree is a few comparisons and a table of leaves:
compact enough to ship as JSON, and evaluated as vectors without any library. Outside its fitted range the residual is
constant, so the corrected roofline extrapolates by its own law. Deterministic: no sampling.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from headway.perf.latency.operators.profiles import Column

Matrix = npt.NDArray[np.float64]
_BINS = 64


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


def fit_trees(
    features: tuple[str, ...],
    x: Matrix,
    y: Column,
    *,
    weight: Column | None = None,
    trees: int = 200,
    depth: int = 5,
    rate: float = 0.12,
    ridge: float = 8.0,
) -> BoostedTrees:
    """Fit y (log residuals, so that errors are relative) by squared loss.

    rate: learning rate. ridge: weight of points at 0 added to every leaf."""
    # side="left": a bin number above i means x > cuts[i], the comparison of `BoostedTrees.__call__`.
    cuts = [_cuts(x[:, j]) for j in range(x.shape[1])]
    binned = [np.searchsorted(cuts[j], x[:, j], side="left") for j in range(x.shape[1])]
    w = np.ones_like(y) if weight is None else weight / weight.mean()
    rest = y.copy()
    questions: list[tuple[tuple[int, int], ...]] = []
    leaves: list[tuple[int, ...]] = []
    for _ in range(trees):
        node = np.zeros(y.size, dtype=np.int64)
        asked: list[tuple[int, int]] = []
        for level in range(depth):
            # One split for all 2^level nodes of this depth.
            best = _best_question(node, 1 << level, binned, cuts, w, rest, ridge)
            if best is None:
                break
            asked.append(best)
            node = 2 * node + (binned[best[0]] > best[1])
        if not asked:
            break
        count = np.bincount(node, w, 1 << len(asked))
        total = np.bincount(node, w * rest, 1 << len(asked))
        # Rounded before the residual is updated, so that later trees correct the rounding.
        values = np.round(rate * total / (count + ridge) * 1e4)
        rest -= values[node] * 1e-4
        questions.append(tuple(asked))
        leaves.append(tuple(int(v) for v in values))
    return BoostedTrees(features, tuple(tuple(float(c) for c in cut) for cut in cuts), tuple(questions), tuple(leaves))


def _cuts(column: Column) -> Column:
    values = np.unique(column)
    if values.size <= 1:
        return np.zeros(0)
    middles = (values[1:] + values[:-1]) / 2
    # Too many distinct values: thresholds at quantiles, each with as many points between.
    if middles.size > _BINS:
        middles = np.unique(np.quantile(column, np.linspace(0, 1, _BINS + 2)[1:-1]))
    return np.asarray(np.round(middles, 4), dtype=np.float64)


def _best_question(
    node: npt.NDArray[np.int64],
    nodes: int,
    binned: list[npt.NDArray[np.int64]],
    cuts: list[Column],
    w: Column,
    rest: Column,
    ridge: float,
) -> tuple[int, int] | None:
    best: tuple[int, int] | None = None
    score = -np.inf
    wr = w * rest
    for j, bins in enumerate(binned):
        size = cuts[j].size + 1
        if size < 2:
            continue
        # Cumulative sums by bin give every threshold's left side at once: residual g, weight c, by node.
        at = node * size + bins
        g = np.bincount(at, wr, nodes * size).reshape(nodes, size).cumsum(axis=1)
        c = np.bincount(at, w, nodes * size).reshape(nodes, size).cumsum(axis=1)
        gl, cl = g[:, :-1], c[:, :-1]
        gr, cr = g[:, -1:] - gl, c[:, -1:] - cl
        gain = (gl**2 / (cl + ridge) + gr**2 / (cr + ridge)).sum(axis=0)
        top = int(np.argmax(gain))
        # The margin makes the first feature win a tie, whatever the rounding of the platform.
        if gain[top] > score + 1e-12:
            best, score = (j, top), float(gain[top])
    return best
