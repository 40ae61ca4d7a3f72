"""What serving adds to the iterations of a latency table: measured by `headway profile`, applied by the simulator."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from statistics import median
from zlib import crc32

import msgspec
import numpy as np

from headway.perf.latency.base import BatchLoad, LatencyModel, Seconds

_LEAST = 5
"""Measurements below which a term is left at zero."""
_LEAST_SPREAD = 50
"""Fewest iterations of similar length whose times are taken as a distribution."""
_QUANTILES = 256
"""Most quantiles of one class."""


class TimeSpread(msgspec.Struct, frozen=True):
    """How much the times of iterations of similar length varied, other things being equal."""

    most_s: float
    """Predicted seconds up to which it holds; of the last class, any."""
    factors: tuple[float, ...]
    """Measured over predicted time at equal steps from the least to the greatest."""

    @classmethod
    def of(cls, most_s: float, ratios: Sequence[float]) -> TimeSpread:
        """Return the spread of measured over predicted times."""
        factors = np.quantile(ratios, np.linspace(0.0, 1.0, min(_QUANTILES, len(ratios))))
        return cls(most_s, tuple(map(float, factors)))

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
        spreads.append(TimeSpread.of(pairs[end - 1][0], ratios))
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
    spread: tuple[TimeSpread, ...] = ()
    """Of an iteration and the engine's own time before it, over what is predicted of both, by predicted length. Empty:
    not measured, so that every iteration takes what is predicted."""

    @classmethod
    def of(cls, requests: Sequence[float], idle: Sequence[float], between: Sequence[float]) -> ServingOverhead:
        """Return the medians of measured seconds: of requests, of iterations after an idle engine (from the arrival to
        the end, less what was predicted), and between iterations."""
        iteration_s, request_s = _typical(between), _typical(requests)
        varied = None
        if request_s and len(requests) >= _LEAST_SPREAD:
            varied = TimeSpread.of(request_s, [max(0.0, each) / request_s for each in requests])
        return cls(request_s, max(0.0, _typical(idle) - iteration_s), iteration_s, varied)

    def way_s(self, request: str) -> float:
        """Return what one request takes on its way, seconds: drawn from what was measured, by its name."""
        if self.requests is None:
            return self.request_s
        return self.request_s * self.requests.at(crc32(request.encode()) / 2**32)

    def with_way_of(self, other: ServingOverhead) -> ServingOverhead:
        """Return this with what requests take on their way, and to wake an engine, in `other`: only clients see it."""
        return msgspec.structs.replace(self, request_s=other.request_s, requests=other.requests, idle_s=other.idle_s)

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


def _typical(seconds: Sequence[float]) -> float:
    return max(0.0, median(seconds)) if len(seconds) >= _LEAST else 0.0


NO_OVERHEAD = ServingOverhead()
"""Nothing is added."""


class HostedLatency(LatencyModel):
    """A latency model whose iterations also take the engine's own time (`host_s` each)."""

    def __init__(self, table: LatencyModel, host_s: float) -> None:
        self.table, self.host_s = table, host_s

    def token_s(self, first: int, last: int) -> Seconds:
        return np.asarray(self.table.token_s(first, last) + self.host_s, dtype=np.float64)

    def rows_s(self, rows: int) -> float:
        return self.table.rows_s(rows) + self.host_s

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        return self.table.chunk_s(past, first, last)

    def attention_s(self, past: int, tokens: int) -> float:
        return self.table.attention_s(past, tokens)

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        return self.table.decode_s(decodes, kv_sum)

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """Ignore measurements: this model stands for reality."""
