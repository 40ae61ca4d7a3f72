"""Latency model interface: predicted seconds of a batch, and the largest chunk that fits a time budget.

Models are *separable*: an iteration's time is a term in its row count (matrix products, collectives and fixed cost),
one for the decodes' attention, and one for each prefill chunk's attention. That covers Medha's roofline, Vidur-style
operator tables and profiles of the live engine (mean error 2-5%, see notes), and a scheduling decision costs
microseconds. `CoupledLatency` is the exception.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]

_INTERPOLATED: Final = 10
"""Look-ups of a search by interpolation before it goes on by halves."""
MAX_CHUNK: Final = 16_384
"""Largest chunk that is ever sized by time, in tokens. (`whole` chunking does not call `solve_tokens`.)"""


class BatchLoad(msgspec.Struct, frozen=True, gc=False):
    """A batch as a latency model sees it: aggregates only, so a prediction costs the same at 1 or 2,048 decodes."""

    tokens: int = 0
    """Rows of the forward pass: decodes and prefill tokens."""
    decodes: int = 0
    """Single-token rows."""
    decode_kv: int = 0
    """KV tokens that all decodes read together."""
    chunk_s: float = 0.0
    """Seconds of attention of all prefill chunks, as predicted when each was added."""
    chunk_past: int = 0
    """Cached tokens that all prefill chunks read together."""
    chunk_scale: float = 0.0
    """Learned factor that `chunk_s` was predicted with (`decode_load`); 0: not recorded."""

    def with_chunk(self, tokens: int, attention_s: float, past: int = 0) -> BatchLoad:
        """Return this load with one more prefill chunk of `tokens` rows over `past` cached tokens."""
        return BatchLoad(
            self.tokens + tokens,
            self.decodes,
            self.decode_kv,
            self.chunk_s + attention_s,
            self.chunk_past + past,
            self.chunk_scale,
        )


class FloorTable(NamedTuple):
    """Lower bounds of a batch: `rows[rows + tokens]`, and `own[tokens] + per_past[tokens] * past`, in seconds."""

    rows: Sequence[float]
    own: Sequence[float]
    per_past: Sequence[float]


class LatencyModel(ABC):
    """Predicted seconds for one pipeline stage of one instance, in its layout.

    Pure: equal arguments give equal results until `observe` is called. Implementations inherit from it. `token_s`,
    `chunk_s` and `decode_s` are required; overriding the scalar methods avoids allocating a vector, and overriding the
    floors speeds up `solve_tokens`."""

    coupled: ClassVar[bool] = False
    """Whether it is a `CoupledLatency`. (Asking an object for what it has not takes a microsecond, compiled.)"""

    @property
    def chunk_scale(self) -> float:
        """Learned factor of `chunk_s`; 0: it does not learn."""
        return 0.0

    @property
    def rough(self) -> bool:
        """Whether it began as a guess, so that it says little of how much longer chunks would gain."""
        return False

    @abstractmethod
    def token_s(self, first: int, last: int) -> Seconds:
        """Time of everything that depends on the row count only, for first..last rows inclusive: shape (last-first+1,).
        Includes what is fixed per iteration. `token_s(0, 0)` is the fixed part."""

    @abstractmethod
    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        """Attention time of one prefill chunk of first..last tokens over `past` cached tokens."""

    @abstractmethod
    def decode_s(self, decodes: int, kv_sum: int) -> float:
        """Attention time of `decodes` single-token rows that read `kv_sum` KV tokens together."""

    def observe(self, load: BatchLoad, measured_s: float) -> None:  # noqa: B027 - few models learn
        """Learn from a batch of this load that took `measured_s`. Models that do not learn ignore it."""

    def rows_s(self, rows: int) -> float:
        """Return `token_s` of one row count."""
        return float(self.token_s(rows, rows)[0])

    def attention_s(self, past: int, tokens: int) -> float:
        """Return `chunk_s` of one chunk."""
        return float(self.chunk_s(past, tokens, tokens)[0])

    def further_prompts(self) -> LatencyModel:
        """Return this model for chunks that join a batch with a prompt in it (`beside_prompts`): itself where batched
        prompts cost their sum."""
        return self

    def decode_steps(self, decodes: int) -> Callable[[int], float]:
        """Return `decode_s` of so many decodes as a function of `kv_sum`, for many steps of the same ones."""
        return lambda kv_sum: self.decode_s(decodes, kv_sum)

    def least_rows_s(self, rows: int) -> float:
        """Return a lower bound of `rows_s` for every row count >= `rows`; non-decreasing in `rows`."""
        return 0.0

    def least_attention_s(self, past: int, tokens: int) -> float:
        """Return a lower bound of `attention_s` for every chunk >= `tokens` over `past`; non-decreasing in `tokens`."""
        return 0.0

    def floor_s(self, rows: int, past: int) -> Callable[[int], float]:
        """Return the sum of both lower bounds as a function of a chunk's tokens, batched with `rows` other rows."""
        return lambda tokens: self.least_rows_s(rows + tokens) + self.least_attention_s(past, tokens)

    def floor_table(self, rows: int, past: int) -> FloorTable | None:
        """Return what `floor_s` of chunks up to MAX_CHUNK is looked up in; None: it is no look-up."""
        return None


class CoupledLatency(LatencyModel):
    """Model whose terms depend on each other (KV that is prefetched while products run costs nothing later).

    The sum of the separable terms is an upper bound of `whole_s`; `whole_s` is non-decreasing in a chunk's tokens."""

    coupled: ClassVar[bool] = True

    @abstractmethod
    def whole_s(self, load: BatchLoad) -> float:
        """Return the predicted seconds of a whole batch."""


def decode_load(model: LatencyModel, decodes: int, kv_sum: int) -> BatchLoad:
    """Return the load of a batch's decodes, to which chunks are added, with the model's current chunk scale.

    The scale is recorded because with several batches in flight the model may have learned between the prediction of
    `chunk_s` and the batch's `observe`."""
    return BatchLoad(decodes, decodes, kv_sum, chunk_scale=model.chunk_scale)


def beside_prompts(model: LatencyModel, load: BatchLoad) -> LatencyModel:
    """Return the model for the next chunk of a batch: the first costs its time alone, further ones maybe less."""
    return model.further_prompts() if load.tokens > load.decodes else model


def load_s(model: LatencyModel, load: BatchLoad) -> float:
    """Return the predicted seconds of a batch."""
    # A coupled model's separable terms are only an upper bound.
    if model.coupled:
        return cast("CoupledLatency", model).whole_s(load)
    return model.rows_s(load.tokens) + decodes_s(model, load) + load.chunk_s


def decodes_s(model: LatencyModel, load: BatchLoad) -> float:
    """Return the attention seconds of a batch's decodes."""
    return model.decode_s(load.decodes, load.decode_kv) if load.decodes else 0.0


def solve_tokens(
    model: LatencyModel, load: BatchLoad, past: int, limit: int, budget_s: float, decode_s: float | None = None
) -> tuple[int, float]:
    """Return the largest chunk (at most `limit` tokens) over `past` KV tokens that keeps the batch within `budget_s`.

    `decode_s`: the load's `decodes_s`, where the caller knows it.

    Returns (tokens, its attention seconds), (0, 0.0) when none fits. Solves *total time <= budget* (DESIGN: roofline
    terms do not subtract, so Medha's Algorithm 2 is not taken literally). Measured time is not monotone in chunk size,
    but the model's floors are: bisection over the floors finds a size beyond which nothing fits, and a downward search
    from there finds the largest size that does fit (mostly that size itself). Exact.
    """
    limit = min(limit, MAX_CHUNK)
    if limit <= 0:
        return 0, 0.0
    if model.coupled:
        return _halve(model, load, past, limit, budget_s)
    # What is left for the row term of the whole batch and the attention of the new chunk.
    left_s = budget_s - (load.chunk_s + (decodes_s(model, load) if decode_s is None else decode_s))
    rows = load.tokens
    attention_s = model.attention_s(past, limit)
    over_s = model.rows_s(rows + limit) + attention_s - left_s
    if over_s <= 0.0:  # the rest of a short prompt mostly fits
        return limit, attention_s
    most = _most_within(model.floor_s(rows, past), limit, left_s, over_s)
    return _downwards(model, rows, past, most, left_s)


def _downwards(model: LatencyModel, rows: int, past: int, most: int, left_s: float) -> tuple[int, float]:
    """Return the largest chunk of at most `most` tokens that fits `left_s`, batched with `rows` other rows.

    Tries `most` itself, then evaluates vectors of sizes below it."""
    if most <= 0:
        return 0, 0.0
    attention_s = model.attention_s(past, most)
    if model.rows_s(rows + most) + attention_s <= left_s:
        return most, attention_s
    width = 128
    while most:
        first = max(1, most - width + 1)
        attention = model.chunk_s(past, first, most)
        fits = (model.token_s(rows + first, rows + most) + attention <= left_s).nonzero()[0]
        if fits.size:
            last = int(fits[-1])
            return first + last, float(attention[last])
        # Windows grow fourfold: a far miss costs few vectors, a near one (the usual case) a short vector.
        most, width = first - 1, 4 * width
    return 0, 0.0


def _most_within(floor_s: Callable[[int], float], limit: int, left_s: float, over_s: float) -> int:
    """Return the largest chunk below `limit` whose floor, non-decreasing in its tokens, is at most `left_s`; 0: none.

    `over_s`: by how much `limit` itself, which is ruled out, is too long, or an estimate above 0.

    Floors are nearly linear, so a line through both ends finds the place in a few look-ups (regula falsi; the end that
    stays counts half, Illinois' variant). After many it halves: floors may be staircases."""
    low, high, high_s = 1, limit, over_s
    if limit < 2 or (low_s := floor_s(low) - left_s) > 0.0:
        return 0
    # Invariant: `low` fits, `high` does not or is the limit; low_s and high_s have the signs of that.
    probes, before = 0, 0
    while high - low > 1:
        probes += 1
        place = (low + high) // 2
        if probes < _INTERPOLATED:
            # Rounded down, so below `high` but for rounding errors.
            place = min(low + (int((high - low) * low_s / (low_s - high_s)) or 1), high - 1)
        over_s = floor_s(place) - left_s
        if over_s <= 0.0:
            low, low_s, high_s, before = place, over_s, high_s * 0.5 if before < 0 else high_s, -1
        else:
            high, high_s, low_s, before = place, over_s, low_s * 0.5 if before > 0 else low_s, 1
    return low


def _halve(model: LatencyModel, load: BatchLoad, past: int, limit: int, budget_s: float) -> tuple[int, float]:
    """Return `solve_tokens` of a coupled model by bisection: its time is non-decreasing in the chunk's tokens."""

    def fits(tokens: int) -> bool:
        return load_s(model, load.with_chunk(tokens, model.attention_s(past, tokens), past)) <= budget_s

    # Invariant: `low` fits (or is 0), `high` does not (or is limit + 1).
    low, high = 0, limit + 1
    middle = limit  # mostly all of it fits
    while high - low > 1:
        low, high = (middle, high) if fits(middle) else (low, middle)
        middle = (low + high) // 2
    if not low:
        return 0, 0.0
    return low, model.attention_s(past, low)


class WrappedLatency(LatencyModel):
    """Model that answers as `base` does. Its heirs change some of the terms, and the floors of those."""

    def __init__(self, base: LatencyModel) -> None:
        self.base = base

    def token_s(self, first: int, last: int) -> Seconds:
        return self.base.token_s(first, last)

    def rows_s(self, rows: int) -> float:
        return self.base.rows_s(rows)

    def least_rows_s(self, rows: int) -> float:
        return self.base.least_rows_s(rows)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        return self.base.chunk_s(past, first, last)

    def attention_s(self, past: int, tokens: int) -> float:
        return self.base.attention_s(past, tokens)

    def least_attention_s(self, past: int, tokens: int) -> float:
        return self.base.least_attention_s(past, tokens)

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        return self.base.decode_s(decodes, kv_sum)

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        self.base.observe(load, measured_s)


# Isolated prefill time by prompt length: Medha's Algorithm 3.
#
# `total_s(n)` is the time of a lone prefill of n tokens with adaptive chunks under t_target. Remaining work is the
# difference of two look-ups, C(total) - C(done). Departures from the paper: where no chunk fits the budget the minimum
# chunk is taken (the paper's `break` would under-estimate long prompts without bound), and entries are computed on
# first use, on a geometric grid, so that start-up costs nothing.

_UNEVEN = 0.25
"""Products and attention may change so differently, as a share, before times are computed anew."""
_MOST_KNOWN = 4096
"""Look-ups that are kept."""
_RESCALED = 2.0
"""Times may be scaled up or down by so much: chunks of another size fit the same iteration then."""


class PrefillCache:
    """Isolated prefill times under one latency model, extended on demand by a scheduler's look-ups.

    `refresh` follows a latency model that has changed noticeably."""

    def __init__(self, model: LatencyModel, t_target_s: float, min_chunk: int = 16) -> None:
        self._model = model
        self._t_target_s = t_target_s
        self._min_chunk = max(1, min_chunk)
        self.rebuild()

    def total_s(self, tokens: int) -> float:
        """Return the seconds to prefill `tokens` from an empty cache, alone. Monotone; total_s(0) == 0."""
        if tokens <= 0:
            return 0.0
        seconds = self._known.get(tokens)
        if seconds is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            seconds = self._known[tokens] = self._interpolated_s(tokens)
        return seconds

    def _interpolated_s(self, tokens: int) -> float:
        while self._tokens[-1] < tokens:
            self._extend()
        # Within the first chunk: exact. Interpolating from 0 would spread the fixed cost over its tokens.
        if tokens <= self._tokens[1]:
            return self._first[tokens - 1] * self._scale
        i = bisect.bisect_left(self._tokens, tokens)
        x0, x1 = self._tokens[i - 1], self._tokens[i]
        y0, y1 = self._seconds[i - 1], self._seconds[i]
        return (y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)) * self._scale

    def remaining_s(self, tokens: int, done: int) -> float:
        """Return the seconds left when `done` of `tokens` are computed: C(tokens) - C(done)."""
        return max(0.0, self.total_s(tokens) - self.total_s(done))

    def rebuild(self) -> None:
        """Drop all entries, after the latency model has changed."""
        # Knots of the cache: `_seconds[i]` to prefill `_tokens[i]` tokens.
        self._tokens, self._seconds = [0], [0.0]
        # Seconds of each prompt of one chunk, by tokens - 1; filled with the first knot.
        self._first: Sequence[float] = np.zeros(0).data
        # Factor of all times since then.
        self._scale = 1.0
        # Look-ups of `total_s`: the same lengths are asked about after every chunk.
        self._known: dict[int, float] = {}
        # The model's predictions when this was built, for `refresh`.
        self._mark = self._probe()

    def refresh(self) -> bool:
        """Follow a changed model. Return whether its predictions have changed by over 10%.

        Rescales all times while products and attention have changed nearly alike, and rebuilds otherwise: look-ups
        after a rebuild cost up to a millisecond. Costs microseconds itself."""
        ratios = [new / old if old > 0 else 1.0 for new, old in zip(self._probe(), self._mark, strict=True)]
        scale = sum(ratios) / len(ratios)
        if max(ratios) - min(ratios) > _UNEVEN * scale or not 1 / _RESCALED <= scale <= _RESCALED:
            self.rebuild()
            return True
        if abs(scale - self._scale) <= 0.1 * self._scale:
            return False
        self._scale = scale
        self._known.clear()
        return True

    def _probe(self) -> tuple[float, float]:
        return self._model.rows_s(64), self._model.attention_s(4096, 64)

    def _chunk(self, past: int) -> tuple[int, float]:
        """Return the chunk that a lone prefill takes over `past` tokens, and the iteration's seconds."""
        chunk, attention = solve_tokens(self._model, BatchLoad(), past, MAX_CHUNK, self._t_target_s)
        if chunk < self._min_chunk:
            chunk = self._min_chunk
            attention = self._model.attention_s(past, chunk)
        return chunk, self._model.rows_s(chunk) + attention

    def _extend(self) -> None:
        """Append one grid point, up to 5% of the context further; all chunks in the step count as its middle one."""
        past = self._tokens[-1]
        chunk, seconds = self._chunk(past)
        repeat = max(1, int(past * 0.05 / chunk))
        if repeat > 1:
            chunk, seconds = self._chunk(past + chunk * (repeat - 1) // 2)
        self._tokens.append(past + chunk * repeat)
        # Look-ups multiply by the scale.
        self._seconds.append(self._seconds[-1] + seconds * repeat / self._scale)
        # Measured times may fall at sizes that suit the device: suffix minima keep the cache monotone.
        if not past:
            alone = self._model.token_s(1, chunk) + self._model.chunk_s(0, 1, chunk)
            self._first = (np.minimum.accumulate(alone[::-1])[::-1] / self._scale).data
