"""The one definition of a percentile: linear interpolation, Hyndman-Fan type 7 (numpy's default)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

PERCENTILES: tuple[float, ...] = (1, 25, 50, 75, 90, 99)


def percentile_name(percent: float) -> str:
    """Return the JSON key of a percentile: `50` → `p50`, `99.9` → `p99.9`."""
    return f"p{percent:g}"


def quantile(values: Sequence[float], percent: float) -> float | None:
    """Return the value below which `percent` per cent of the sample lies; None for an empty sample."""
    return float(np.percentile(np.asarray(values, dtype=float), percent)) if len(values) else None


def percentiles(values: Iterable[float | None], percents: Sequence[float] = PERCENTILES) -> dict[str, float | None]:
    """Return percentiles plus mean, min, max and n of the values that are not None; all None for an empty sample."""
    # an array has no None: no pass in Python over millions of gaps
    known = values if isinstance(values, np.ndarray) else [value for value in values if value is not None]
    sample = np.asarray(known, dtype=float)
    names = [percentile_name(percent) for percent in percents]
    if sample.size == 0:
        return {"n": 0, "mean": None, "min": None, "max": None, **dict.fromkeys(names)}
    cuts = np.percentile(sample, list(percents))
    body = {name: float(cut) for name, cut in zip(names, np.atleast_1d(cuts), strict=True)}
    return {
        "n": int(sample.size),
        "mean": float(sample.mean()),
        "min": float(sample.min()),
        "max": float(sample.max()),
        **body,
    }
