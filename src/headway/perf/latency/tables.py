"""A latency model as dense tables: what every measured or fitted source is compiled to at start-up.

token table: seconds by row count, one entry a row (a staircase survives). Chunk attention: a(c) + b(c) * past, with
one pair a chunk size. Decode attention: fixed + per request + per KV token. (`notes`: linear in past holds within
2-3% as far as anybody has measured, which is 4x beyond the fitted range.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.perf.latency.base import MAX_CHUNK, BatchLoad, LatencyModel, Seconds

SCHEMA = "headway.latency/1"


class DecodeTable(msgspec.Struct, frozen=True):
    """Decode attention in seconds where its rate depends on how much is read: `seconds[i][j]` for counts[i] requests of
    past[j] cached tokens each; beyond the grid each further token costs `per_token`."""

    counts: tuple[int, ...]
    past: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    per_token: float


class PastTable(msgspec.Struct, frozen=True):
    """What a chunk costs over a history besides b(c) * past. Rows (tokens, offset s, s a token): any history costs
    the offset, and each cached token beyond `knee` the last in place of b(c)."""

    knee: int
    chunks: tuple[tuple[int, float, float], ...]


class TableSource(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored on disk: measured knots, and where they come from. Compiled to `TableLatency`.

    tokens: (rows, seconds) knots, ascending. chunks: (tokens, a seconds, b seconds per past token), ascending.
    decode: (fixed s, s per request, s per KV token), or `decode_grid`, which then goes before it.
    exchange: (s an iteration, s a row and guest group) that attending rows in another KV group costs besides the
    attention (`perf.latency.shard_exchange`); None where nobody measured it.
    fingerprint: model × device × layout that this holds for.
    status: "measured" on this very model and device, "fitted" from profiles of its operators, or "derived" by scaling
    and rooflines where no profile exists. validated_past: the longest history that anything measured.
    """

    schema: str = SCHEMA
    fingerprint: str
    provenance: str
    tokens: tuple[tuple[int, float], ...]
    chunks: tuple[tuple[int, float, float], ...]
    decode: tuple[float, float, float]
    decode_grid: DecodeTable | None = None
    past: PastTable | None = None
    exchange: tuple[float, float] | None = None
    validated_past: int = 0
    status: str = "measured"
    details: Mapping[str, Any] = {}


class TableLatency(LatencyModel):
    """`LatencyModel` over dense arrays. A lookup is a slice, or of one entry a float: no search."""

    def __init__(self, source: TableSource, max_rows: int = 2 * MAX_CHUNK) -> None:
        self.source = source
        self._tokens = _dense(
            [(float(rows), seconds) for rows, seconds in source.tokens], max_rows, "token knots", start=0
        )
        self._rows, self._least_rows = self._tokens.data, _floor(self._tokens).data
        self._last = max_rows
        a = _dense([(float(c), a) for c, a, _ in source.chunks], MAX_CHUNK, "chunk knots", start=0, power=2)
        b = _dense([(float(c), b) for c, _, b in source.chunks], MAX_CHUNK, "chunk knots", start=0)
        self._fresh = self._over = self._beyond = _ChunkAttention(a, b)
        self._knee = 0
        if source.past is not None:
            self._knee = source.past.knee
            far = source.past.chunks
            offset = _dense([(float(c), o) for c, o, _ in far], MAX_CHUNK, "chunk knots", start=0)
            slope = _dense([(float(c), b) for c, _, b in far], MAX_CHUNK, "chunk knots", start=0)
            self._over = _ChunkAttention(a + offset, b)
            self._beyond = _ChunkAttention(a + offset + (b - slope) * self._knee, slope)
        self._decode = source.decode
        self._grid = _BilinearGrid(source.decode_grid) if source.decode_grid is not None else None

    def token_s(self, first: int, last: int) -> Seconds:
        if last <= self._last:
            return self._tokens[first : last + 1]
        rows = np.arange(first, last + 1, dtype=np.float64)
        slope = max(0.0, float(self._tokens[-1] - self._tokens[-1025]) / 1024.0)
        inside = np.minimum(rows, self._last).astype(np.int64)
        return np.asarray(self._tokens[inside] + slope * (rows - inside), dtype=np.float64)

    def rows_s(self, rows: int) -> float:
        return self._rows[rows] if rows <= self._last else float(self.token_s(rows, rows)[0])

    def least_rows_s(self, rows: int) -> float:
        return self._least_rows[rows] if rows <= self._last else self._least_rows[-1]

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        chunks = self._chunks(past)
        if last <= MAX_CHUNK:
            return chunks.a[first : last + 1] + chunks.b[first : last + 1] * float(past)
        ratio = np.arange(first, last + 1, dtype=np.float64) / MAX_CHUNK
        own = self._fresh.a[-1]
        rest = chunks.a[-1] - own + chunks.b[-1] * past
        return np.asarray(own * ratio**2 + rest * ratio, dtype=np.float64)

    def attention_s(self, past: int, tokens: int) -> float:
        if tokens > MAX_CHUNK:
            return float(self.chunk_s(past, tokens, tokens)[0])
        chunks = self._chunks(past)
        return chunks.own[tokens] + chunks.per_past[tokens] * past

    def least_attention_s(self, past: int, tokens: int) -> float:
        if tokens > MAX_CHUNK:
            tokens = MAX_CHUNK
        chunks = self._chunks(past)
        return chunks.least_own[tokens] + chunks.least_per_past[tokens] * past

    def floor_s(self, rows: int, past: int) -> Callable[[int], float]:
        if rows + MAX_CHUNK > self._last:
            return super().floor_s(rows, past)
        least_rows, chunks = self._least_rows, self._chunks(past)
        own, per_past = chunks.least_own, chunks.least_per_past
        return lambda tokens: least_rows[rows + tokens] + (own[tokens] + per_past[tokens] * past)

    def _chunks(self, past: int) -> _ChunkAttention:
        return self._fresh if not past else self._over if past <= self._knee else self._beyond

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        if self._grid is not None:
            return self._grid(decodes, kv_sum)
        fixed, per_request, per_token = self._decode
        return fixed + per_request * decodes + per_token * kv_sum

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """Tables are what was measured; they do not learn (see `corrected`)."""


class _ChunkAttention:
    """Attention of each chunk size, a + b * past: as arrays, as floats, and the floors of both."""

    __slots__ = ("a", "b", "least_own", "least_per_past", "own", "per_past")

    def __init__(self, a: Seconds, b: Seconds) -> None:
        self.a, self.b = a, b
        self.own, self.per_past = a.data, b.data
        self.least_own, self.least_per_past = _floor(a).data, _floor(b).data


def _floor(values: Seconds) -> Seconds:
    """At each place the least of what is there and behind it."""
    return np.ascontiguousarray(np.minimum.accumulate(values[::-1])[::-1])


class _BilinearGrid:
    """Bilinear look-up over (requests, mean cached tokens), in plain Python floats: about a microsecond.

    Linear in both between knots, because time is (nearly) linear in what is read; knots are dense in octaves.
    """

    def __init__(self, table: DecodeTable) -> None:
        self._counts, self._past = list(table.counts), list(table.past)
        self._rows = [list(row) for row in table.seconds]
        self._per_token = table.per_token
        flat = [v for row in self._rows for v in row]
        shaped = len(self._rows) == len(self._counts) and all(len(row) == len(self._past) for row in self._rows)
        ascending = all(a < b for knots in (self._counts, self._past) for a, b in pairwise(knots))
        if min(len(self._counts), len(self._past)) < 2 or not (shaped and ascending and np.all(np.isfinite(flat))):
            raise ConfigError("the decode grid of a latency table is misshapen: profile again")

    def __call__(self, decodes: int, kv_sum: int) -> float:
        counts, past = self._counts, self._past
        mean = kv_sum / decodes if decodes else 0.0
        n, p = min(max(decodes, counts[0]), counts[-1]), min(max(mean, past[0]), past[-1])
        i = min(bisect_right(counts, n) - 1, len(counts) - 2)
        j = min(bisect_right(past, p) - 1, len(past) - 2)
        u = (n - counts[i]) / (counts[i + 1] - counts[i])
        v = (p - past[j]) / (past[j + 1] - past[j])
        low, high = self._rows[i], self._rows[i + 1]
        a = low[j] + (low[j + 1] - low[j]) * v
        b = high[j] + (high[j + 1] - high[j]) * v
        return a + (b - a) * u + max(0.0, kv_sum - n * p) * self._per_token


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
