"""A latency model as dense tables: what every measured or fitted source is compiled to at start-up.

token table: seconds by row count, one entry a row (a staircase survives). Chunk attention: a(c) + b(c) * past, with
one pair a chunk size. Decode attention: fixed + per request + per KV token. (`notes`: linear in past holds within
2-3% as far as anybody has measured, which is 4x beyond the fitted range.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.latency.base import MAX_CHUNK, Load, Seconds

SCHEMA = "headway.latency/1"


class TableSource(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored on disk: measured knots, and where they come from. Compiled to `TableLatency`.

    tokens: (rows, seconds) knots, ascending. chunks: (tokens, a seconds, b seconds per past token), ascending.
    decode: (fixed s, s per request, s per KV token). fingerprint: model × device × layout that this holds for.
    """

    schema: str = SCHEMA
    fingerprint: str
    provenance: str
    tokens: tuple[tuple[int, float], ...]
    chunks: tuple[tuple[int, float, float], ...]
    decode: tuple[float, float, float]
    validated_past: int = 0
    details: Mapping[str, Any] = {}


class TableLatency:
    """`LatencyModel` over dense arrays. A lookup is a slice: no copy, no search."""

    def __init__(self, source: TableSource, max_rows: int = 2 * MAX_CHUNK) -> None:
        self.source = source
        self._tokens = _dense(
            [(float(rows), seconds) for rows, seconds in source.tokens], max_rows, "token knots", start=0
        )
        self._a = _dense([(float(c), a) for c, a, _ in source.chunks], MAX_CHUNK, "chunk knots", start=0, power=2)
        self._b = _dense([(float(c), b) for c, _, b in source.chunks], MAX_CHUNK, "chunk knots", start=0)
        self._decode = source.decode

    def token_s(self, first: int, last: int) -> Seconds:
        if last < self._tokens.size:
            return self._tokens[first : last + 1]
        rows = np.arange(first, last + 1, dtype=np.float64)
        slope = max(0.0, float(self._tokens[-1] - self._tokens[-1025]) / 1024.0)
        inside = np.minimum(rows, self._tokens.size - 1).astype(np.int64)
        return np.asarray(self._tokens[inside] + slope * (rows - inside), dtype=np.float64)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        if last < self._a.size:
            return self._a[first : last + 1] + self._b[first : last + 1] * float(past)
        sizes = np.arange(first, last + 1, dtype=np.float64)
        ratio = sizes / (self._a.size - 1)
        return np.asarray(self._a[-1] * ratio**2 + self._b[-1] * ratio * past, dtype=np.float64)

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        fixed, per_request, per_token = self._decode
        return fixed + per_request * decodes + per_token * kv_sum

    def observe(self, load: Load, measured_s: float) -> None:
        """Tables are what was measured; they do not learn (see `corrected`)."""


def _dense(knots: Sequence[tuple[float, float]], size: int, what: str, start: int, power: int = 1) -> Seconds:
    """Linear interpolation between knots at start..size; beyond the last knot the last slope goes on (or, for
    power 2, growth with the square: causal attention of a chunk within itself)."""
    if len(knots) < 2:
        raise ConfigError(f"a latency table needs at least two {what}, found {len(knots)}: profile again")
    x = np.array([k[0] for k in knots])
    y = np.array([k[1] for k in knots])
    if not (np.all(np.diff(x) > 0) and np.all(np.isfinite(y))):
        raise ConfigError(f"{what} of a latency table must ascend and be finite: profile again")
    grid = np.arange(start, size + 1, dtype=np.float64)
    dense = np.interp(grid, x, y)
    beyond = grid > x[-1]
    if power == 1:
        dense[beyond] = y[-1] + (grid[beyond] - x[-1]) * max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
    else:
        dense[beyond] = y[-1] * (grid[beyond] / x[-1]) ** power
    return np.asarray(np.maximum(dense, 0.0), dtype=np.float64)
