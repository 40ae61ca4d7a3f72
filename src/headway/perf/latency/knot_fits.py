"""Fits of measured points to the linear terms of a `TableSource`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit seconds = a + b * past by relative error, a and b at least 0."""
    if len(points) == 1:
        return points[0][1], 0.0
    past = np.array([p for p, _ in points], dtype=np.float64)
    seconds = np.array([s for _, s in points])
    # Rows divided by the measured seconds: least squares then minimise relative errors.
    design = np.stack([np.ones_like(past), past], axis=1) / seconds[:, None]
    (a, b), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    if a < 0 or b < 0:
        a, b = float(seconds[0]), max(0.0, float((seconds[-1] - seconds[0]) / max(past[-1] - past[0], 1.0)))
    return float(a), float(b)


def fit_decodes(
    points: Sequence[tuple[int, int, float]], scales: Sequence[float] | None = None
) -> tuple[float, float, float]:
    """Fit (fixed, per request, per KV token) seconds to points (requests, KV tokens, seconds); no term is negative.

    scales: seconds that the error at each point is relative to; default: the point's own.
    """
    if not points:
        return 0.0, 0.0, 0.0
    n = np.array([p[0] for p in points], dtype=np.float64)
    kv = np.array([p[1] for p in points], dtype=np.float64)
    seconds = np.array([p[2] for p in points])
    scale = seconds if scales is None else np.array(scales)
    columns = np.stack([np.ones_like(n), n, kv], axis=1) / scale[:, None]
    # Three terms need at least four points; with fewer, the fixed term is left out.
    active = [1, 2] if len(points) < 4 else [0, 1, 2]
    while active:
        solution, *_ = np.linalg.lstsq(columns[:, active], seconds / scale, rcond=None)
        if (solution >= 0).all():
            terms = dict(zip(active, (float(x) for x in solution), strict=True))
            return terms.get(0, 0.0), terms.get(1, 0.0), terms.get(2, 0.0)
        # The most negative term goes, and the others are fitted again.
        active.pop(int(np.argmin(solution)))
    return 0.0, max(0.0, float(np.median(seconds / n))), 0.0
