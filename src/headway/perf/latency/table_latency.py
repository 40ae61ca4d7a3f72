"""Latency model as dense tables, to which every measured or fitted source is compiled at start-up.

Row table: seconds by row count, one entry per row count (so tile staircases are kept). Chunk attention: a(c) + b(c) *
past, one pair per chunk size. Decode attention: fixed + per request + per KV token, or a grid. Linearity in past holds
within 2-3% over the measured range, 4x beyond the fitted one (see notes).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.perf.latency.base import MAX_CHUNK, BatchLoad, FloorTable, LatencyModel, Seconds
from headway.perf.latency.further_prompts import FurtherPrompts
from headway.perf.latency.serving_overhead import ServingOverhead

SCHEMA = "headway.latency/1"


class DecodeTable(msgspec.Struct, frozen=True):
    """Decode attention by requests and cached tokens, for devices whose read rate depends on the bytes read."""

    counts: tuple[int, ...]
    """Numbers of requests, ascending."""
    past: tuple[int, ...]
    """Cached tokens of each request, ascending."""
    seconds: tuple[tuple[float, ...], ...]
    """`seconds[i][j]`: counts[i] requests of past[j] cached tokens each."""
    per_token: float
    """Seconds of each KV token beyond the grid."""


class PastTable(msgspec.Struct, frozen=True):
    """Cost of a chunk over cached tokens in addition to b(c) * past."""

    knee: int
    """Cached tokens from which on the slope of `chunks` applies in place of b(c)."""
    chunks: tuple[tuple[int, float, float], ...]
    """(chunk tokens, seconds that any history adds, seconds per cached token beyond `knee`), ascending."""


class TableSource(msgspec.Struct, frozen=True, kw_only=True):
    """Latency profile as stored on disk: measured knots and their provenance. Compiled to `TableLatency`."""

    schema: str = SCHEMA
    fingerprint: str
    """Model × device × layout that the profile holds for."""
    provenance: str
    """Origin of the numbers, in words."""
    tokens: tuple[tuple[int, float], ...]
    """(rows, seconds) knots, ascending."""
    chunks: tuple[tuple[int, float, float], ...]
    """(chunk tokens, a in seconds, b in seconds per cached token), ascending."""
    decode: tuple[float, float, float]
    """(fixed seconds, seconds per request, seconds per KV token); unused where there is a `decode_grid`."""
    decode_grid: DecodeTable | None = None
    past: PastTable | None = None
    further: tuple[tuple[int, float], ...] = ()
    """(chunk tokens, share of its attention's time alone that a chunk adds to a batch with a prompt in it), both
    ascending; empty: all of it, so that batched prompts cost their sum."""
    exchange: tuple[float, float] | None = None
    """(seconds per iteration, seconds per row and remote group) of attending rows in another KV group, in addition to
    the attention (`perf.latency.shard_exchange`); None where it was not measured."""
    serving: ServingOverhead | None = None
    """What serving adds (`headway profile --serve-for`); None where it was not measured."""
    validated_past: int = 0
    """Longest history that was measured, in tokens."""
    status: str = "measured"
    """"measured" on this model and device, "fitted" from profiles of its operators, or "derived" by scaling and
    rooflines where no profile exists."""
    details: Mapping[str, Any] = {}
    """For `fitted` sources: origin by operator family, assumptions, validated ranges."""


class TableLatency(LatencyModel):
    """`LatencyModel` over dense arrays: a look-up is a slice or an index, without search."""

    def __init__(self, source: TableSource, max_rows: int = 2 * MAX_CHUNK) -> None:
        self.source = source
        self._tokens = _dense(
            [(float(rows), seconds) for rows, seconds in source.tokens], max_rows, "token knots", start=0
        )
        self._rows: Sequence[float] = self._tokens.data
        self._least_rows: Sequence[float] = _floor(self._tokens).data
        self._last = max_rows
        a = _dense([(float(c), a) for c, a, _ in source.chunks], MAX_CHUNK, "chunk knots", start=0)
        _continue_in_pieces(a, source.chunks[-1])
        b = _dense([(float(c), b) for c, _, b in source.chunks], MAX_CHUNK, "chunk knots", start=0)
        # Three lines in past: `_fresh` without history, `_over` up to the knee, `_beyond` after it.
        self._fresh = self._over = self._beyond = _ChunkAttention(a, b)
        self._knee = 0
        if source.past is not None:
            self._knee = source.past.knee
            far = source.past.chunks
            offset = _dense([(float(c), o) for c, o, _ in far], MAX_CHUNK, "chunk knots", start=0)
            slope = _dense([(float(c), b) for c, _, b in far], MAX_CHUNK, "chunk knots", start=0)
            self._over = _ChunkAttention(a + offset, b)
            # Intercept such that both lines meet at the knee: a + offset + b·knee = intercept + slope·knee.
            self._beyond = _ChunkAttention(a + offset + (b - slope) * self._knee, slope)
        self._decode = source.decode
        self._grid = _BilinearGrid(source.decode_grid) if source.decode_grid is not None else None
        self._share = _shares(source.further) if source.further else None

    def __reduce__(self) -> tuple[type[TableLatency], tuple[TableSource, int]]:
        # Another process gets the knots and makes the arrays again.
        return TableLatency, (self.source, self._last)

    def token_s(self, first: int, last: int) -> Seconds:
        if last <= self._last:
            return self._tokens[first : last + 1]
        rows = np.arange(first, last + 1, dtype=np.float64)
        # Beyond the table: the mean slope of its last 1,024 rows, which averages over tile steps.
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
        # Beyond MAX_CHUNK: the chunk's own triangle grows with the square, everything over its history linearly.
        ratio = np.arange(first, last + 1, dtype=np.float64) / MAX_CHUNK
        own = self._fresh.a[-1]
        rest = chunks.a[-1] - own + chunks.b[-1] * past
        return np.asarray(own * ratio**2 + rest * ratio, dtype=np.float64)

    def attention_s(self, past: int, tokens: int) -> float:
        if tokens > MAX_CHUNK:
            return float(self.chunk_s(past, tokens, tokens)[0])
        # As `_chunks`, without a call: nothing is looked up more often.
        chunks = self._fresh if not past else self._over if past <= self._knee else self._beyond
        return chunks.own[tokens] + chunks.per_past[tokens] * past

    def least_attention_s(self, past: int, tokens: int) -> float:
        if tokens > MAX_CHUNK:
            tokens = MAX_CHUNK
        chunks = self._chunks(past)
        return chunks.least_own[tokens] + chunks.least_per_past[tokens] * past

    def floor_s(self, rows: int, past: int) -> Callable[[int], float]:
        table = self.floor_table(rows, past)
        if table is None:
            return super().floor_s(rows, past)
        # One closure over three arrays: a search calls it about eight times.
        least_rows, own, per_past = table
        return lambda tokens: least_rows[rows + tokens] + (own[tokens] + per_past[tokens] * past)

    def floor_table(self, rows: int, past: int) -> FloorTable | None:
        # Look-ups do not check bounds, so every row count in question must be in the table.
        if rows + MAX_CHUNK > self._last:
            return None
        chunks = self._chunks(past)
        return FloorTable(self._least_rows, chunks.least_own, chunks.least_per_past)

    def _chunks(self, past: int) -> _ChunkAttention:
        return self._fresh if not past else self._over if past <= self._knee else self._beyond

    def further_prompts(self) -> LatencyModel:
        return self if self._share is None else FurtherPrompts(self, self._share)

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        if self._grid is not None:
            return self._grid(decodes, kv_sum)
        fixed, per_request, per_token = self._decode
        return fixed + per_request * decodes + per_token * kv_sum

    def decode_steps(self, decodes: int) -> Callable[[int], float]:
        return super().decode_steps(decodes) if self._grid is None else self._grid.steps(decodes)

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """Ignore the measurement: tables do not learn (see `corrected`)."""


class _ChunkAttention:
    """Attention of each chunk size, a + b * past: as arrays, as memoryviews (floats without numpy scalars), and the
    floors of both."""

    __slots__ = ("a", "b", "least_own", "least_per_past", "own", "per_past")

    def __init__(self, a: Seconds, b: Seconds) -> None:
        self.a, self.b = a, b
        self.own: Sequence[float] = a.data
        self.per_past: Sequence[float] = b.data
        self.least_own: Sequence[float] = _floor(a).data
        self.least_per_past: Sequence[float] = _floor(b).data


def _shares(knots: Sequence[tuple[int, float]]) -> Seconds:
    """Return the share of further prompts by chunk tokens, from 0 on; constant beyond both ends."""
    at, share = np.array(knots, dtype=np.float64).T
    return np.asarray(np.interp(np.arange(MAX_CHUNK + 1), at, share), dtype=np.float64)


def _floor(values: Seconds) -> Seconds:
    """Return the suffix minimum: at each index the least value from there on."""
    return np.ascontiguousarray(np.minimum.accumulate(values[::-1])[::-1])


class _BilinearGrid:
    """Bilinear look-up over (requests, mean cached tokens), in plain Python floats: about a microsecond.

    Linear in both between knots, because time is (nearly) linear in what is read; knots are dense in octaves.
    """

    def __init__(self, table: DecodeTable) -> None:
        self._counts, self._past = list(table.counts), [float(tokens) for tokens in table.past]
        self._rows = [list(row) for row in table.seconds]
        self._per_token = table.per_token
        # Look-ups by number of requests.
        self._steps: dict[int, Callable[[int], float]] = {}
        flat = [v for row in self._rows for v in row]
        shaped = len(self._rows) == len(self._counts) and all(len(row) == len(self._past) for row in self._rows)
        ascending = all(a < b for knots in (self._counts, self._past) for a, b in pairwise(knots))
        if min(len(self._counts), len(self._past)) < 2 or not (shaped and ascending and np.all(np.isfinite(flat))):
            raise ConfigError("the decode grid of a latency table is misshapen: profile again")

    def __call__(self, decodes: int, kv_sum: int) -> float:
        steps = self._steps.get(decodes)
        if steps is None:
            steps = self._steps[decodes] = self.steps(decodes)
        return steps(kv_sum)

    def steps(self, decodes: int) -> Callable[[int], float]:
        """Return the look-up of one number of requests, as a function of `kv_sum`."""
        counts, past, per_token = self._counts, self._past, self._per_token
        # Clamp to the grid; tokens beyond it are added at the end at `per_token`.
        n = min(max(decodes, counts[0]), counts[-1])
        # The last cell's upper edge belongs to that cell: at most len - 2.
        i, cells = min(bisect_right(counts, n) - 1, len(counts) - 2), len(past) - 2
        u = (n - counts[i]) / (counts[i + 1] - counts[i])
        low, high = self._rows[i], self._rows[i + 1]
        least, most = past[0], past[-1]

        def seconds(kv_sum: int) -> float:
            p = kv_sum / decodes if decodes else 0.0
            if p < least:
                p = least
            elif p > most:
                p = most
            j = bisect_right(past, p) - 1
            if j > cells:
                j = cells
            v = (p - past[j]) / (past[j + 1] - past[j])
            a = low[j] + (low[j + 1] - low[j]) * v
            b = high[j] + (high[j + 1] - high[j]) * v
            beyond = kv_sum - n * p
            return a + (b - a) * u + (beyond * per_token if beyond > 0.0 else 0.0)

        return seconds


def _continue_in_pieces(own: Seconds, last: tuple[int, float, float]) -> None:
    """Set the attention of chunks within themselves beyond the last knot: that of pieces of the last knot's size, each
    over those before it. (Its square alone would also multiply what any chunk costs, and small ones cost little else.)
    """
    size, seconds, per_past = last
    tokens = np.arange(size + 1, len(own), dtype=np.float64)
    own[size + 1 :] = np.maximum(0.0, tokens / size * (seconds + per_past * (tokens - size) / 2.0))


def _dense(knots: Sequence[tuple[float, float]], size: int, what: str, start: int) -> Seconds:
    """Interpolate knots linearly at start..size; beyond the last one the last slope continues. Raises ConfigError when
    knots do not ascend or are not finite."""
    if len(knots) < 2:
        raise ConfigError(f"a latency table needs at least two {what}, found {len(knots)}: profile again")
    x = np.array([k[0] for k in knots])
    y = np.array([k[1] for k in knots])
    if not (np.all(np.diff(x) > 0) and np.all(np.isfinite(y))):
        raise ConfigError(f"{what} of a latency table must ascend and be finite: profile again")
    grid = np.arange(start, size + 1, dtype=np.float64)
    dense = np.interp(grid, x, y)
    beyond = grid > x[-1]
    dense[beyond] = y[-1] + (grid[beyond] - x[-1]) * max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
    return np.asarray(np.maximum(dense, 0.0), dtype=np.float64)
