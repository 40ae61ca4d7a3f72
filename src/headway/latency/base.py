"""The one question that schedulers ask: how long does this batch take, and how many tokens fit a budget?

All models here are *separable*: an iteration's time is a term in its token count (matrix products, collectives and
what is fixed), one for the decodes' attention, and one for each prefill chunk's attention. That covers Medha's
roofline, Vidur-style operator tables and profiles of the live engine (measured in notes: mean error 2-5%), and it
makes a decision cost microseconds: a chunk is sized by evaluating all candidates as one vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]

MAX_CHUNK = 16_384
"""Largest chunk that is ever sized by time, in tokens. (`whole` chunking does not ask.)"""


class Load(NamedTuple):
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

    def with_chunk(self, tokens: int, attention_s: float, past: int = 0) -> Load:
        return Load(
            self.tokens + tokens,
            self.decodes,
            self.decode_kv,
            self.chunk_s + attention_s,
            self.chunk_past + past,
            self.chunk_scale,
        )


class LatencyModel(Protocol):
    """Predicted seconds for one pipeline stage of one instance, in its layout. Pure: the same question, the same
    answer, until `observe` is called."""

    def token_s(self, first: int, last: int) -> Seconds:
        """Time of everything that depends on the row count only, for first..last rows inclusive: shape (last-first+1,).
        Includes what is fixed per iteration. `token_s(0, 0)` is the fixed part."""

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        """Attention time of one prefill chunk of first..last tokens over `past` cached tokens."""

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        """Attention time of `decodes` single-token rows that read `kv_sum` KV tokens together."""

    def observe(self, load: Load, measured_s: float) -> None:
        """A batch of this load took `measured_s`. Models that do not learn ignore it."""


class CoupledLatency(LatencyModel, Protocol):
    """A model whose terms depend on each other (KV that is prefetched while products run costs nothing later). Its
    separable terms bound `whole_s` from above; `whole_s` never falls as a chunk grows."""

    def whole_s(self, load: Load) -> float:
        """Seconds of a batch, all of it at once."""


def decode_load(model: LatencyModel, decodes: int, kv_sum: int) -> Load:
    """What a batch starts from: its decodes, before chunks join, and the scale that chunks are told at from now on.
    With several batches in flight the model has learned more when this one is observed than when it was made."""
    return Load(decodes, decodes, kv_sum, chunk_scale=getattr(model, "chunk_scale", 0.0))


def load_s(model: LatencyModel, load: Load) -> float:
    """Predicted seconds of a batch."""
    whole_s: Callable[[Load], float] | None = getattr(model, "whole_s", None)
    if whole_s is not None:
        return whole_s(load)
    decode = model.decode_s(load.decodes, load.decode_kv) if load.decodes else 0.0
    return float(model.token_s(load.tokens, load.tokens)[0]) + decode + load.chunk_s


def one_chunk_s(model: LatencyModel, past: int, tokens: int) -> float:
    """Attention seconds of one chunk."""
    return float(model.chunk_s(past, tokens, tokens)[0])


def solve_tokens(model: LatencyModel, load: Load, past: int, limit: int, budget_s: float) -> tuple[int, float]:
    """The largest chunk (at most `limit` tokens) over `past` KV tokens that keeps the whole batch within `budget_s`.

    Returns (tokens, its attention seconds), (0, 0.0) when none fits. Solves *total time <= budget* (DESIGN: roofline
    terms do not subtract, so Medha's Algorithm 2 is not taken literally); all candidates are evaluated as one vector
    and the largest feasible one is taken, because measured time is not monotone in chunk size. Exact as long as no
    larger chunk takes less than half the time of a smaller one (sizes beyond twice the budget are not looked at).
    """
    limit = min(limit, MAX_CHUNK)
    if limit <= 0:
        return 0, 0.0
    if hasattr(model, "whole_s"):
        return _halve(model, load, past, limit, budget_s)
    rest = load.chunk_s + (model.decode_s(load.decodes, load.decode_kv) if load.decodes else 0.0)
    if limit <= 1024:  # the rest of a short prompt, which mostly fits
        whole = one_chunk_s(model, past, limit)
        if float(model.token_s(load.tokens + limit, load.tokens + limit)[0]) + whole <= budget_s - rest:
            return limit, whole
    low, top = 1, limit
    probe = 128
    while probe < top:
        seconds = _total(model, load, past, probe)
        if seconds + rest > 2 * budget_s:
            top = probe
            break
        if seconds <= budget_s - rest:
            low = probe
        probe *= 8
    attention = model.chunk_s(past, low, top)
    total = model.token_s(load.tokens + low, load.tokens + top) + attention
    feasible = (total <= budget_s - rest)[::-1]
    last = int(feasible.argmax())
    if not feasible[last]:
        return 0, 0.0
    best = total.size - 1 - last
    return low + best, float(attention[best])


def _halve(model: LatencyModel, load: Load, past: int, limit: int, budget_s: float) -> tuple[int, float]:
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


def _total(model: LatencyModel, load: Load, past: int, tokens: int) -> float:
    at = load.tokens + tokens
    return float(model.token_s(at, at)[0]) + one_chunk_s(model, past, tokens)
