"""Scales of a latency table's terms, fitted to all iterations of a run.

`CorrectedLatency` follows the last couple of hundred iterations, so that what it knows at the end of a run is what the
host did in its last second. What is to hold for another run, or for the whole of this one, is fitted to all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.perf.latency.corrected import CEILING, FLOOR, OUTLIER, LoadTerms

_PRIOR = 1.0
"""Weight of scales of 1, in iterations: for terms that hardly occurred."""


def fit_scales(terms: Sequence[LoadTerms], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the scales (fixed, rows, decodes, chunks) by which the `terms` best sum up to what iterations took.

    Least squares of relative errors; times above `OUTLIER` times the prediction count as that. No scale leaves
    FLOOR..CEILING."""
    x, took = np.array(terms, dtype=np.float64), np.array(seconds, dtype=np.float64)
    scales = np.ones(4)
    for _ in range(20):
        predicted = np.maximum(x @ scales, 1e-9)
        rows, target = x / predicted[:, None], np.minimum(took / predicted, OUTLIER)
        gram, right = rows.T @ rows + _PRIOR * np.eye(4), rows.T @ target + _PRIOR
        # One scale after another, so that each stays within its bounds: terms that occur together are told apart badly.
        for i in list(range(4)) * 10:
            scales[i] = np.clip((right[i] - gram[i] @ scales) / gram[i, i] + scales[i], FLOOR, CEILING)
    return tuple(float(scale) for scale in scales)
