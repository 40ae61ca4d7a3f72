"""What serving adds to the iterations of a latency table: measured by `headway profile`, applied by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

from headway.perf.latency.base import BatchLoad, LatencyModel, Seconds

_LEAST = 5
"""Measurements below which a term is left at zero."""


class ServingOverhead(msgspec.Struct, frozen=True):
    """Medians of a run, seconds."""

    request_s: float = 0.0
    """From the client's sending to the engine's queue, and from the first token's end to the client, together: HTTP,
    tokenising, messages between processes."""
    idle_s: float = 0.0
    """More than predicted that an iteration takes, from the arrival on, after the engine had nothing to do: threads
    wake, caches are cold."""
    iteration_s: float = 0.0
    """The engine's own time between two iterations in a row."""

    @classmethod
    def of(cls, requests: Sequence[float], idle: Sequence[float], between: Sequence[float]) -> ServingOverhead:
        """Return the medians of measured seconds: of requests, of iterations after an idle engine (from the arrival to
        the end, less what was predicted), and between iterations."""
        iteration_s = _typical(between)
        return cls(_typical(requests), max(0.0, _typical(idle) - iteration_s), iteration_s)

    def words(self) -> str:
        """Return it for people."""
        return (
            f"{self.request_s * 1e3:.1f} ms a request on its way in and out, {self.idle_s * 1e3:.1f} ms after idling, "
            f"{self.iteration_s * 1e3:.2f} ms between iterations"
        )


def _typical(seconds: Sequence[float]) -> float:
    return max(0.0, median(seconds)) if len(seconds) >= _LEAST else 0.0


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
