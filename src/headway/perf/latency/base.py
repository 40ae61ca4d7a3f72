"""The one question that schedulers ask: how long does this batch take, and how many tokens fit a budget?

All models here are *separable*: an iteration's time is a term in its token count (matrix products, collectives and
what is fixed), one for the decodes' attention, and one for each prefill chunk's attention. That covers Medha's
roofline, Vidur-style operator tables and profiles of the live engine (measured in notes: mean error 2-5%), and it
makes a decision cost microseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]

MAX_CHUNK = 16_384
"""Largest chunk that is ever sized by time, in tokens. (`whole` chunking does not ask.)"""


class BatchLoad(msgspec.Struct, frozen=True, gc=False):
    """A batch as a latency model sees it: aggregates only, so that it costs the same at 1 or 2,048 decodes.

    tokens: rows of the forward pass. decodes, decode_kv: how many decode, and the KV tokens that they read together.
    chunk_s: seconds of the attention of the prefill chunks in it. chunk_past: cached tokens that they read together.
    chunk_scale: what a model that learns had multiplied chunk_s by when it said it (`decode_load`); 0: nothing noted.
    """

    tokens: int = 0
    decodes: int = 0
    decode_kv: int = 0
    chunk_s: float = 0.0
    chunk_past: int = 0
    chunk_scale: float = 0.0

    def with_chunk(self, tokens: int, attention_s: float, past: int = 0) -> BatchLoad:
        return BatchLoad(
            self.tokens + tokens,
            self.decodes,
            self.decode_kv,
            self.chunk_s + attention_s,
            self.chunk_past + past,
            self.chunk_scale,
        )


class LatencyModel(Protocol):
    """Predicted seconds for one pipeline stage of one instance, in its layout. Pure: the same question, the same
    answer, until `observe` is called. Inherit it: a model of few numbers needs the first four methods only, and others
    answer single questions without making a vector, and give floors, which make the choice of a chunk fast."""

    def token_s(self, first: int, last: int) -> Seconds:
        """Time of everything that depends on the row count only, for first..last rows inclusive: shape (last-first+1,).
        Includes what is fixed per iteration. `token_s(0, 0)` is the fixed part."""
        ...

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        """Attention time of one prefill chunk of first..last tokens over `past` cached tokens."""
        ...

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        """Attention time of `decodes` single-token rows that read `kv_sum` KV tokens together."""
        ...

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """A batch of this load took `measured_s`. Models that do not learn ignore it."""

    def rows_s(self, rows: int) -> float:
        """`token_s` of one row count."""
        return float(self.token_s(rows, rows)[0])

    def attention_s(self, past: int, tokens: int) -> float:
        """`chunk_s` of one chunk."""
        return float(self.chunk_s(past, tokens, tokens)[0])

    def least_rows_s(self, rows: int) -> float:
        """A floor: no row count from `rows` on takes less. It never falls as `rows` grows."""
        return 0.0

    def least_attention_s(self, past: int, tokens: int) -> float:
        """A floor: no chunk of `tokens` or more over `past` takes less. It never falls as `tokens` grows."""
        return 0.0

    def floor_s(self, rows: int, past: int) -> Callable[[int], float]:
        """Both floors together, of a chunk beside so many rows, by its tokens."""
        return lambda tokens: self.least_rows_s(rows + tokens) + self.least_attention_s(past, tokens)


class CoupledLatency(LatencyModel, Protocol):
    """A model whose terms depend on each other (KV that is prefetched while products run costs nothing later). Its
    separable terms bound `whole_s` from above; `whole_s` never falls as a chunk grows."""

    def whole_s(self, load: BatchLoad) -> float:
        """Seconds of a batch, all of it at once."""


def decode_load(model: LatencyModel, decodes: int, kv_sum: int) -> BatchLoad:
    """What a batch starts from: its decodes, before chunks join, and the scale that chunks are told at from now on.
    With several batches in flight the model has learned more when this one is observed than when it was made."""
    return BatchLoad(decodes, decodes, kv_sum, chunk_scale=getattr(model, "chunk_scale", 0.0))


def load_s(model: LatencyModel, load: BatchLoad) -> float:
    """Predicted seconds of a batch."""
    whole_s: Callable[[BatchLoad], float] | None = getattr(model, "whole_s", None)
    if whole_s is not None:
        return whole_s(load)
    decode = model.decode_s(load.decodes, load.decode_kv) if load.decodes else 0.0
    return model.rows_s(load.tokens) + decode + load.chunk_s


def one_chunk_s(model: LatencyModel, past: int, tokens: int) -> float:
    """Attention seconds of one chunk."""
    return model.attention_s(past, tokens)


def solve_tokens(model: LatencyModel, load: BatchLoad, past: int, limit: int, budget_s: float) -> tuple[int, float]:
    """The largest chunk (at most `limit` tokens) over `past` KV tokens that keeps the whole batch within `budget_s`.

    Returns (tokens, its attention seconds), (0, 0.0) when none fits. Solves *total time <= budget* (DESIGN: roofline
    terms do not subtract, so Medha's Algorithm 2 is not taken literally). Measured time is not monotone in chunk size;
    the model's floors are, so halving finds a size beyond which nothing fits, and from there the first that does fit is
    looked for downwards: mostly it is that size itself. Exact.
    """
    limit = min(limit, MAX_CHUNK)
    if limit <= 0:
        return 0, 0.0
    if hasattr(model, "whole_s"):
        return _halve(model, load, past, limit, budget_s)
    left_s = budget_s - (load.chunk_s + (model.decode_s(load.decodes, load.decode_kv) if load.decodes else 0.0))
    rows = load.tokens
    attention_s = model.attention_s(past, limit)
    if model.rows_s(rows + limit) + attention_s <= left_s:  # the rest of a short prompt mostly fits
        return limit, attention_s
    most = bisect_right(range(1, limit), left_s, key=model.floor_s(rows, past))
    return _downwards(model, rows, past, most, left_s)


def _downwards(model: LatencyModel, rows: int, past: int, most: int, left_s: float) -> tuple[int, float]:
    """The first chunk from `most` tokens downwards that fits beside so many rows: that one, else by vectors."""
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
        most, width = first - 1, 4 * width
    return 0, 0.0


def _halve(model: LatencyModel, load: BatchLoad, past: int, limit: int, budget_s: float) -> tuple[int, float]:
    """The same for a coupled model, whose time grows with the chunk: by halving."""

    def fits(tokens: int) -> bool:
        return load_s(model, load.with_chunk(tokens, one_chunk_s(model, past, tokens), past)) <= budget_s

    low, high = 0, limit + 1
    middle = limit  # mostly all of it fits
    while high - low > 1:
        low, high = (middle, high) if fits(middle) else (low, middle)
        middle = (low + high) // 2
    if not low:
        return 0, 0.0
    return low, one_chunk_s(model, past, low)
