"""The knee of a capacity curve: the load up to which a latency stays within so many times its value at light load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

TIMES = 5.0
"""Tetris normalises to 25 times; there the curve is past its knee already, and depends on how long a run is."""


TRUST = 1.5
"""Factor by which a point may lie off the monotone fit. Beyond it the curve is noise around a knee, not a knee."""


class SupportedKnee(NamedTuple):
    """The knee of a curve that a monotone fit describes, and the loads between which it lies."""

    load: float
    low: float
    """The highest load up to which every point, at its upper bound, is within the limit."""
    high: float
    """The lowest load from which on every point, at its lower bound, is above it; infinite: the last point may not
    be."""


def monotone(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to the values in least squares (pooling of adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        # A pool below the one before it is merged with it, at their common mean.
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, n), (second, m) = pools[-2:]
            pools[-2:] = [((first * n + second * m) / (n + m), n + m)]
    return [value for value, count in pools for _ in range(count)]


def supported_knee(line: Sequence[tuple[float, float, float]], times: float = TIMES) -> SupportedKnee | None:
    """Return the knee of (load, latency, half of its interval) points, where a monotone fit supports one.

    The fit is of the latencies' logarithms. None where there is no knee, and where a point lies off the fit by more
    than the factor `TRUST`: a latency cannot fall as load rises, so that such a curve is too noisy to have one.
    """
    points = sorted(line)
    if len(points) < 2 or any(latency <= 0 for _, latency, _ in points):
        return None
    logs = [math.log(latency) for _, latency, _ in points]
    fit = monotone(logs)
    if max(abs(one - other) for one, other in zip(logs, fit, strict=True)) > math.log(TRUST):
        return None
    loads = [load for load, _, _ in points]
    at = knee([(load, math.exp(value)) for load, value in zip(loads, fit, strict=True)], times)
    if at is None:
        return None
    limit = times * math.exp(fit[0])
    # The points themselves, with their intervals, say between which loads the limit is passed.
    below = [load for load, latency, half in points if latency + half <= limit]
    above = [load for load, latency, half in points if latency - half <= limit]
    first_over = next((load for load, latency, half in points if latency + half > limit), math.inf)
    low = max((load for load in below if load < first_over), default=loads[0])
    high = min((load for load in loads if load > max(above, default=-math.inf)), default=math.inf)
    return SupportedKnee(at, min(low, at), max(high, at))


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
