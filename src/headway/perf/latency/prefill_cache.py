"""Isolated prefill time by prompt length: Medha's Algorithm 3.

`total_s(n)` is the time of a lone prefill of n tokens with adaptive chunks under t_target. Remaining work is the
difference of two look-ups, C(total) - C(done). Departures from the paper: where no chunk fits the budget the minimum
chunk is taken (the paper's `break` would under-estimate long prompts without bound), and entries are computed on first
use, on a geometric grid, so that start-up costs nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from headway.perf.latency.base import MAX_CHUNK, BatchLoad, LatencyModel, one_chunk_s, solve_tokens

_UNEVEN = 0.25
"""Products and attention may change so differently, as a share, before times are computed anew."""
_MOST_KNOWN = 4096
"""Look-ups that are kept."""
_RESCALED = 2.0
"""Times may be scaled up or down by so much: chunks of another size fit the same iteration then."""


class PrefillCache:
    """Isolated prefill times under one latency model, extended on demand by a scheduler's look-ups.

    `refresh` follows a latency model that has changed noticeably."""

    def __init__(self, model: LatencyModel, t_target_s: float, min_chunk: int = 16, max_chunk: int = MAX_CHUNK) -> None:
        self._model = model
        self._t_target_s = t_target_s
        self._min_chunk = max(1, min_chunk)
        self._max_chunk = max_chunk
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
        return self._model.rows_s(64), one_chunk_s(self._model, 4096, 64)

    def _chunk(self, past: int) -> tuple[int, float]:
        """Return the chunk that a lone prefill takes over `past` tokens, and the iteration's seconds."""
        chunk, attention = solve_tokens(self._model, BatchLoad(), past, self._max_chunk, self._t_target_s)
        if chunk < self._min_chunk:
            chunk = self._min_chunk
            attention = one_chunk_s(self._model, past, chunk)
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
