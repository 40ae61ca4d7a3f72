"""Latency table from whole iterations, for an engine whose operators cannot be timed one by one.

A step of one chunk takes rows(c) + own(c) + b(c) * past. Only the sum of the first two is seen without history; they
are told apart by the slope: a token of a causal chunk attends half of the chunk on average, so own(c) = b(c) * c / 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from headway.core.errors import ConfigError
from headway.perf.latency.base import LatencyModel, decode_load, load_s
from headway.perf.latency.knot_fits import fit_decodes, fit_line
from headway.perf.latency.table_latency import TableSource

_LEAST_ROWS_SHARE = 0.2
"""Least share of a step without history that is taken for its rows rather than for attention."""
_FAR = 4
"""Knots whose mean slope continues the rows beyond the largest chunk."""


class StepSample(NamedTuple):
    """One measured iteration."""

    chunk: int
    """Prompt tokens of its only prefill; 0: none."""
    past: int
    """Cached tokens of that prefill."""
    decodes: int
    decode_kv: int
    """KV tokens that all decodes read together."""
    seconds: float


def step_table(samples: Sequence[StepSample], fingerprint: str, provenance: str) -> TableSource:
    """Fit a table to steps that hold either one chunk or decodes only; the others are left out.

    Raises ConfigError where chunks of fewer than two sizes were measured without history.
    """
    chunks = _fastest((s.chunk, s.past, s.seconds) for s in samples if s.chunk and not s.decodes)
    slopes = _slopes(chunks)
    rows, attention = [(0, 0.0)], [(0, 0.0, 0.0)]
    for size, alone in sorted((chunk, seconds) for (chunk, past), seconds in chunks.items() if not past):
        slope = _slope_of(size, slopes)
        own = min(slope * size / 2, (1 - _LEAST_ROWS_SHARE) * alone)
        rows.append((size, alone - own))
        attention.append((size, own, slope))
    if len(rows) < 3:
        raise ConfigError("too few steps were measured for a latency table: give --budget more seconds")
    if len(rows) > _FAR:
        # Beyond the largest the table goes on as its last two knots do: those of several, since one may be disturbed.
        (size, alone), (first, first_s) = rows[-1], rows[-_FAR]
        rows.append((2 * size, alone + max(0.0, alone - first_s) * size / (size - first)))
    # A step without rows cannot be measured: half of the smallest stands for the fixed part.
    rows[0] = (0, rows[1][1] / 2)
    decodes = _fastest((s.decodes, s.decode_kv, s.seconds) for s in samples if s.decodes and not s.chunk)
    sizes, seconds = [size for size, _ in rows], [each for _, each in rows]
    alone_s = [(n, kv, whole - float(np.interp(n, sizes, seconds))) for (n, kv), whole in decodes.items()]
    return TableSource(
        fingerprint=fingerprint,
        provenance=provenance,
        tokens=tuple(rows),
        chunks=tuple(attention),
        decode=fit_decodes(alone_s, list(decodes.values())),
        validated_past=max((past for _, past in chunks), default=0),
    )


def _slopes(chunks: Mapping[tuple[int, int], float]) -> list[tuple[int, float]]:
    """Return (chunk size, seconds per cached token) of the sizes that were measured over histories, ascending."""
    sizes = sorted({chunk for chunk, past in chunks if past})
    return [(size, fit_line([(p, s) for (chunk, p), s in chunks.items() if chunk == size])[1]) for size in sizes]


def _slope_of(size: int, slopes: Sequence[tuple[int, float]]) -> float:
    """Return the slope of a chunk size: between measured ones by interpolation, beyond them in proportion."""
    if not slopes:
        return 0.0
    largest, slope = slopes[-1]
    if size > largest:
        return slope * size / largest
    return float(np.interp(size, [0, *(n for n, _ in slopes)], [0.0, *(each for _, each in slopes)]))


def median_error(latency: LatencyModel, samples: Sequence[StepSample]) -> float:
    """Return the median of |predicted / measured - 1| over the fastest sample of each step; 0 for none."""
    fastest = {s[:4]: s for s in sorted(samples, key=lambda s: -s.seconds)}.values()
    return median(abs(predicted_s(latency, s) / s.seconds - 1) for s in fastest) if fastest else 0.0


def predicted_s(latency: LatencyModel, sample: StepSample) -> float:
    """Return the seconds that a model predicts for a sample's step."""
    load = decode_load(latency, sample.decodes, sample.decode_kv)
    if sample.chunk:
        load = load.with_chunk(sample.chunk, latency.attention_s(sample.past, sample.chunk), sample.past)
    return load_s(latency, load)


def _fastest(points: Iterable[tuple[int, int, float]]) -> dict[tuple[int, int], float]:
    """Return the least seconds of each measured point: other load on the host can only add time."""
    found: dict[tuple[int, int], float] = {}
    for first, second, seconds in points:
        found[first, second] = min(seconds, found.get((first, second), seconds))
    return dict(sorted(found.items()))
