"""The knee of a capacity curve: the load up to which a latency stays within so many times its value at light load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

TIMES = 5.0
"""Tetris normalises to 25 times; there the curve is past its knee already, and depends on how long a run is."""


def knee(line: Sequence[tuple[float, float]], times: float = TIMES) -> float | None:
    """Return the load at which latency first exceeds `times` that of the lowest load.

    line: (load, latency), in any order. Between two points the latency's logarithm is taken as linear. None when the
    limit is never exceeded, with fewer than two points, or when the lowest load's latency is not above 0.
    """
    points = sorted(line)
    if len(points) < 2 or points[0][1] <= 0:
        return None
    limit = times * points[0][1]
    for (low, below), (high, above) in pairwise(points):
        if above > limit:
            below = max(below, 1e-12)
            return low + (high - low) * math.log(limit / below) / math.log(above / below)
    return None
