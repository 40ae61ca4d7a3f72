"""Latency model as dense tables, and where tables come from: measured operators, whole iterations, a roofline, or a
stored profile; with the scales of a run and the overhead of serving multiplied in.

Row table: seconds by row count, one entry per row count (so tile staircases are kept). Chunk attention: a(c) + b(c) *
past, one pair per chunk size. Decode attention: fixed + per request + per KV token, or a grid. Linearity in past holds
within 2-3% over the measured range, 4x beyond the fitted one (see notes).
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.core.files import read_input
from headway.perf.hardware import ModelShape
from headway.perf.latency.base import (
    MAX_CHUNK,
    BatchLoad,
    FloorTable,
    LatencyModel,
    Seconds,
    WrappedLatency,
    decode_load,
    load_s,
)

_LEAST = 5
"""Measurements below which a term is left at zero."""
_FAR_LENGTHS = 4
"""Longest prompt over the shortest from which on a time for each token is fitted."""
_LEAST_SPREAD = 50
"""Fewest iterations of similar length whose times are taken as a distribution."""
_USUAL = 0.9
"""Share of iterations that vary in proportion to their length; what the others take longer is a pause."""
_QUANTILES = 256
"""Most quantiles of one class."""


class TimeSpread(msgspec.Struct, frozen=True):
    """How much the times of iterations of similar length varied, other things being equal."""

    most_s: float
    """Predicted seconds up to which it holds; of the last class, any."""
    factors: tuple[float, ...]
    """Measured over predicted time at equal steps from the least to the greatest."""
    typical_s: float = 0.0
    """Median of the predicted seconds. Factors above `_USUAL` of them are of pauses, which last as long however long
    the iteration is: as many seconds as at this length. 0: not known, factors hold for any length."""

    @classmethod
    def of(cls, most_s: float, ratios: Sequence[float], typical_s: float = 0.0) -> TimeSpread:
        """Return the spread of measured over predicted times."""
        factors = np.quantile(ratios, np.linspace(0.0, 1.0, min(_QUANTILES, len(ratios))))
        return cls(most_s, tuple(map(float, factors)), typical_s)

    def factor(self, share: float, predicted_s: float) -> float:
        """Return `at(share)` for an iteration of this predicted length."""
        factor = self.at(share)
        usual = self.at(_USUAL) if self.typical_s else factor
        return factor if factor <= usual else usual + (factor - usual) * self.typical_s / predicted_s

    def at(self, share: float) -> float:
        """Return the factor below which `share` of the measured ones lie, 0 to 1."""
        place = share * (len(self.factors) - 1)
        low = min(int(place), len(self.factors) - 2)
        return self.factors[low] + (place - low) * (self.factors[low + 1] - self.factors[low])


def spreads_of(predicted: Sequence[float], measured: Sequence[float]) -> tuple[TimeSpread, ...]:
    """Return the spreads of iterations by predicted length, shortest first; empty where there are too few.

    A class is as wide as a factor of two, or as `_LEAST_SPREAD` iterations need: the same pause is a larger share of a
    short iteration."""
    pairs = sorted(pair for pair in zip(predicted, measured, strict=True) if pair[0] > 0)
    spreads, first = [], 0
    while len(pairs) - first >= _LEAST_SPREAD:
        end = max(bisect_left(pairs, (2 * pairs[first][0], 0.0)), first + _LEAST_SPREAD)
        if len(pairs) - end < _LEAST_SPREAD:
            end = len(pairs)
        ratios = [took / said for said, took in pairs[first:end]]
        spreads.append(TimeSpread.of(pairs[end - 1][0], ratios, median(said for said, _ in pairs[first:end])))
        first = end
    return tuple(spreads)


def spread_at(spreads: Sequence[TimeSpread], predicted_s: float) -> TimeSpread:
    """Return the spread that holds for an iteration of this predicted length."""
    return spreads[min(bisect_left(spreads, predicted_s, key=lambda one: one.most_s), len(spreads) - 1)]


class ServingOverhead(msgspec.Struct, frozen=True):
    """Medians of a run, seconds, and how iterations vary."""

    request_s: float = 0.0
    """From the client's sending to the engine's queue, and from the first token's end to the client, together: HTTP,
    tokenising, messages between processes."""
    idle_s: float = 0.0
    """More than predicted that an iteration takes, from the arrival on, after the engine had nothing to do: threads
    wake, caches are cold."""
    iteration_s: float = 0.0
    """The engine's own time between two iterations in a row."""
    requests: TimeSpread | None = None
    """How much `request_s` varied: a thread that finds its core taken waits for a tick of the system's clock. None: not
    measured, so that every request takes the median."""
    token_s: float = 0.0
    """Seconds of each token of a prompt before the engine has it: one API server reads and tokenises one prompt after
    another, so that prompts which come together wait for each other. Not in `request_s`."""
    spread: tuple[TimeSpread, ...] = ()
    """Measured over predicted time of an iteration and the engine's own time before it, by predicted length. Empty: not
    measured, so that every iteration takes its predicted time."""

    @classmethod
    def of(
        cls, requests: Sequence[tuple[int, float]], idle: Sequence[float], between: Sequence[float]
    ) -> ServingOverhead:
        """Return the medians of measured seconds: of requests (tokens of the prompt, seconds), of iterations after an
        idle engine (from the arrival to the end, less what was predicted), and between iterations."""
        token_s = _token_s(requests)
        ways = [seconds - token_s * tokens for tokens, seconds in requests]
        iteration_s, request_s = _typical(between), _typical(ways)
        varied = None
        if request_s and len(ways) >= _LEAST_SPREAD:
            varied = TimeSpread.of(request_s, [max(0.0, each) / request_s for each in ways])
        return cls(request_s, max(0.0, _typical(idle) - iteration_s), iteration_s, varied, token_s)

    def way_s(self, request: str) -> float:
        """Return what one request takes on its way, seconds: drawn from what was measured, by its name."""
        if self.requests is None:
            return self.request_s
        return self.request_s * self.requests.at(crc32(request.encode()) / 2**32)

    def with_way_of(self, other: ServingOverhead) -> ServingOverhead:
        """Return this with what requests take on their way, and to wake an engine, in `other`: only clients see it."""
        return msgspec.structs.replace(
            self, request_s=other.request_s, token_s=other.token_s, requests=other.requests, idle_s=other.idle_s
        )

    def with_unmeasured_of(self, other: ServingOverhead, woken: int = 0) -> ServingOverhead:
        """Return this with what `other` has of what was not measured here. `woken`: iterations after an idle engine, of
        which enough say that they take no longer than others."""
        missing = {name: value for name, value in msgspec.structs.asdict(other).items() if not getattr(self, name)}
        if woken >= _LEAST:
            missing.pop("idle_s", None)
        return msgspec.structs.replace(self, **missing)

    def words(self) -> str:
        """Return it for people."""
        return (
            f"{self.request_s * 1e3:.1f} ms a request on its way in and out{self._requests_words()}, "
            f"{self.token_s * 1e6:.1f} µs a token of its prompt, "
            f"{self.idle_s * 1e3:.1f} ms after idling, {self.iteration_s * 1e3:.2f} ms between iterations"
            + self._spread_words()
        )

    def _requests_words(self) -> str:
        return "" if self.requests is None else f" (one in ten over {self.request_s * self.requests.at(0.9) * 1e3:.1f})"

    def _spread_words(self) -> str:
        if not self.spread:
            return ""
        worst = max(one.at(0.99) for one in self.spread)
        return f"; one iteration in a hundred takes up to {worst:.2g} times what is predicted"


def _token_s(requests: Sequence[tuple[int, float]]) -> float:
    """Return the seconds of each token of a prompt: the median slope between the shorter and the longer half of the
    requests; 0 where they are few or of similar length, so that noise would be taken for a slope."""
    ordered = sorted(requests)
    half = len(ordered) // 2
    if half < _LEAST or ordered[-1][0] < _FAR_LENGTHS * max(1, ordered[0][0]):
        return 0.0
    pairs = zip(ordered[:half], ordered[-half:], strict=True)
    slopes = [(late - early) / (more - less) for (less, early), (more, late) in pairs if more > less]
    return max(0.0, median(slopes)) if slopes else 0.0


def _typical(seconds: Sequence[float]) -> float:
    return max(0.0, median(seconds)) if len(seconds) >= _LEAST else 0.0


NO_OVERHEAD = ServingOverhead()
"""Nothing is added."""


class HostedLatency(WrappedLatency):
    """A latency model whose iterations also take the engine's own time (`host_s` each). It stands for reality, so that
    it does not learn."""

    def __init__(self, base: LatencyModel, host_s: float) -> None:
        super().__init__(base)
        self.host_s = host_s

    def token_s(self, first: int, last: int) -> Seconds:
        return np.asarray(self.base.token_s(first, last) + self.host_s, dtype=np.float64)

    def rows_s(self, rows: int) -> float:
        return self.base.rows_s(rows) + self.host_s

    def further_prompts(self) -> LatencyModel:
        further = self.base.further_prompts()
        return further if further is self.base else HostedLatency(further, self.host_s)

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """Ignore the measurement."""


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
    the attention (`perf.latency.groups`); None where it was not measured."""
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
        return self if self._share is None else FurtherPrompts(self, self._share, self._beyond)

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


class FurtherPrompts(WrappedLatency):
    """View of a model in which every chunk is a further one of its batch.

    It fills what the chunks before it left idle, and so takes a share of its time alone, as measured on chunks without
    history. Reading a long one keeps the whole device busy: a chunk takes no less than its history does then."""

    def __init__(self, base: LatencyModel, share: Seconds, history: _ChunkAttention, scale: float = 1.0) -> None:
        """share: by chunk tokens from 0 on, non-decreasing (the floors need it); the last holds for longer ones.
        history: its terms in past are those of the whole device. scale: of `base` over the model that has them."""
        super().__init__(base)
        self.share, self.history, self._scale = share, history, scale

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        at = np.minimum(np.arange(first, last + 1), MAX_CHUNK)
        shared_s = self.base.chunk_s(past, first, last) * self.share[at]
        return np.asarray(np.maximum(shared_s, self.history.b[at] * float(past) * self._scale), dtype=np.float64)

    def attention_s(self, past: int, tokens: int) -> float:
        at = min(tokens, MAX_CHUNK)
        shared_s = self.base.attention_s(past, tokens) * float(self.share[at])
        return max(shared_s, self.history.per_past[at] * past * self._scale)

    def least_attention_s(self, past: int, tokens: int) -> float:
        at = min(tokens, MAX_CHUNK)
        shared_s = self.base.least_attention_s(past, tokens) * float(self.share[at])
        return max(shared_s, self.history.least_per_past[at] * past * self._scale)


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


# Roofline latency model: iteration time from FLOPs, bytes and a few efficiencies, for devices without a profile.
#
# After Medha (§3.1-3.2, and the prototype's A1): matrix products take the larger of weight traffic and arithmetic;
# attention of a chunk the larger of KV traffic and arithmetic; decodes read their KV once.


class MachineRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates that a device reaches, after efficiencies."""

    linear_flops: float
    """FLOP/s of matrix products."""
    attention_flops: float
    """FLOP/s of attention."""
    bandwidth: float
    """Memory bytes/s."""
    fixed_s: float = 1e-3
    """Seconds of every iteration."""
    per_decode_s: float = 2e-5
    """Seconds of each decode in each layer, besides reading its KV."""
    attention_rows: int = 1
    """Fewest rows that attention to cached tokens computes, up to 16 for each token of a chunk: a kernel works in
    tiles, and unpacks the KV once for all rows of a chunk."""
    name: str = "unnamed"


# Row counts and chunk sizes of the tables' knots; linear in between.
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, MAX_CHUNK)


def roofline(shape: ModelShape, rates: MachineRates) -> TableLatency:
    """Return the roofline of a whole model on one device, compiled to tables."""
    weights = shape.layers * shape.layer_parameters * shape.dtype_bytes + shape.vocab * shape.hidden * shape.dtype_bytes
    rows = np.array((0, *KNOTS, 2 * MAX_CHUNK), dtype=np.float64)
    arithmetic = np.array([shape.linear_flops(int(r)) for r in rows]) / rates.linear_flops
    # Weights are read once an iteration, however many rows there are, and not at all without rows.
    seconds = rates.fixed_s + np.maximum(arithmetic, np.where(rows > 0, weights / rates.bandwidth, 0.0))
    kv_read = shape.kv_bytes_per_token / rates.bandwidth
    chunks = []
    for c in (0, *KNOTS):
        computed = max(c, min(rates.attention_rows, 16 * c))
        # Arithmetic of one more cached token for all rows of the chunk, or reading its KV once.
        flops = max(shape.attention_flops(computed, 1) - shape.attention_flops(computed, 0), 0.0)
        per_past = max(flops / rates.attention_flops, kv_read if c else 0.0)
        own = shape.attention_flops(c, 0) / rates.attention_flops
        chunks.append((c, own, per_past))
    return TableLatency(
        TableSource(
            fingerprint="",
            provenance=f"roofline of {rates.name}",
            tokens=tuple((int(r), float(s)) for r, s in zip(rows, seconds, strict=True)),
            chunks=tuple(chunks),
            decode=(0.0, rates.per_decode_s * shape.layers, kv_read),
        )
    )


# Latency tables with the scales that `CorrectedLatency` learned in a run multiplied into them.
#
# A grid measured in isolation, each point at its best, is faster than serving: caches are warm, nothing else runs, the
# host does not wake from idle. A run's scales give the ratio for each term; with them in the table, a simulation of
# another run starts from the cost of serving. Every term of a table is linear in its scale, so the result is exact.


def bake(source: TableSource, scales: Iterable[float], provenance: str) -> TableSource:
    """Return `source` with its terms multiplied by `scales` = (fixed, rows, decodes, chunks).

    Equals `CorrectedLatency` with these scales. `provenance` is appended to the table's own."""
    fixed, rows, decodes, chunks = (float(scale) for scale in scales)
    # CorrectedLatency takes one row's time t1 as the fixed part: rows·(t - t1) + fixed·t1 = rows·t + t1·(fixed - rows).
    base_s = TableLatency(source).rows_s(1)
    grid, past = source.decode_grid, source.past
    return msgspec.structs.replace(
        source,
        provenance=f"{source.provenance}; {provenance}",
        tokens=tuple((count, max(0.0, seconds * rows + base_s * (fixed - rows))) for count, seconds in source.tokens),
        chunks=tuple((tokens, own * chunks, per_past * chunks) for tokens, own, per_past in source.chunks),
        decode=tuple(term * decodes for term in source.decode),
        decode_grid=None
        if grid is None
        else msgspec.structs.replace(
            grid,
            seconds=tuple(tuple(seconds * decodes for seconds in row) for row in grid.seconds),
            per_token=grid.per_token * decodes,
        ),
        past=None
        if past is None
        else msgspec.structs.replace(
            past, chunks=tuple((tokens, offset * chunks, slope * chunks) for tokens, offset, slope in past.chunks)
        ),
    )


def fingerprint(model: str, dtype: str, device: str, threads: int, layout: str = "tp1-pp1-kvp1") -> str:
    """Return the key of a profile. device: the processor's name, not just its kind."""
    return f"{model}|{dtype}|{device}|{threads} threads|{layout}"


def threads_of(path: Path) -> int | None:
    """Return the number of threads that a profile was measured with. None: the file is not one that says so."""
    try:
        words = load(path, None).fingerprint.split("|")
        return int(words[3].removesuffix(" threads"))
    except (ConfigError, IndexError, ValueError):
        return None


def default_path(mark: str) -> Path:
    """Return the path of the profile with fingerprint `mark`: `$XDG_CACHE_HOME/headway/latency/<hash>.json`.

    The default of `$XDG_CACHE_HOME` is ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "headway" / "latency" / f"{hashlib.sha256(mark.encode()).hexdigest()[:24]}.json"


def save(source: TableSource, path: Path) -> None:
    """Write a profile atomically, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Per process: two processes that profile at once do not write into one scratch file.
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(source), indent=1))
    scratch.replace(path)


def load(path: Path, mark: str | None) -> TableSource:
    """Read a profile. Raises ConfigError when the file is unreadable or its fingerprint is not `mark` (None: any)."""
    try:
        source = msgspec.json.decode(read_input(path), type=TableSource)
    except OSError as error:
        raise ConfigError(f"cannot read the latency profile {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a latency profile ({error}): make one with `headway profile`") from error
    if source.schema != SCHEMA:
        raise ConfigError(
            f"{path} has schema {source.schema!r}, which this version cannot read: make one with `headway profile`"
        )
    # A profile of another model, device, layout or number of threads would mispredict silently.
    if mark is not None and source.fingerprint != mark:
        raise ConfigError(
            f"the latency profile {path} was measured for\n  {source.fingerprint}\nand not for\n  {mark}\n"
            "make one with `headway profile`"
        )
    return source


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


# Latency table from whole iterations, for an engine whose operators cannot be timed one by one.
#
# A step of one chunk takes rows(c) + own(c) + b(c) * past. Only the sum of the first two is seen without history; they
# are told apart by the slope: a token of a causal chunk attends half of the chunk on average, so own(c) = b(c) * c / 2.

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
