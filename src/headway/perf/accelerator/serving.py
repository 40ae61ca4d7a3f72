"""Latency model of an accelerator that prefetches KV, for the scheduler, live or simulated.

Products are tabulated by row count when the model is made (from the mapping search at knots, linear between them),
attention is closed-form, and a batch is composed as in `timeline.run`: `whole_s` equals a stage of `stage` in the
model's mode, and costs microseconds. The separable terms are those of packing without prefetch, an upper bound.

Departures from a stage: chunks of several prompts in one iteration attend one after the other; whether queries stay on
chip is decided by a chunk's size alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headway.core.errors import ConfigError
from headway.perf.accelerator.attention import (
    ChunkNumbers,
    array_seconds,
    chunk_numbers,
    kv_bytes,
    own_cycles,
    tiles,
    vector_seconds,
)
from headway.perf.accelerator.machine_model import MachineModel
from headway.perf.accelerator.operators import OperatorSetting, elementwise_cost, fused_of, products
from headway.perf.accelerator.timeline import Mode
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.base import MAX_CHUNK, BatchLoad, CoupledLatency, Seconds

MOST_ROWS = MAX_CHUNK + 2048
KNOTS = (
    1, 2, 4, 8, *range(16, 1024, 16), *range(1024, 2048, 64), *range(2048, 8192, 512), *range(8192, MOST_ROWS, 2048),
    MOST_ROWS,
)  # fmt: skip


class AcceleratorLatency(CoupledLatency):
    """`CoupledLatency` of one instance without pipeline stages."""

    def __init__(self, setting: OperatorSetting, mode: Mode) -> None:
        """Tabulate the model. mode: packing or prefetch. Raises ConfigError for serial."""
        if mode == "serial":
            raise ConfigError("mode must be packing or prefetch: a scheduler always packs")
        shape, machine, _, assumed, _ = setting
        self.setting, self.mode = setting, mode
        self._model = setting.model
        self._layers = shape.layers
        self._bandwidth = machine.bandwidth
        buffer = float(machine.prefetch_bytes) if mode == "prefetch" else 0.0
        self._most_ahead = max(buffer, float(assumed.ahead_bytes))
        self._kv_bytes = kv_bytes(shape, setting.precision)
        self._kv_s = _decode_s_per_token(setting)
        self._decode_rows = assumed.decode_rows
        self._written = self._kv_bytes if assumed.decode_kv_written else 0.0
        self._in_attention, self._cold = assumed.prefetch_in_attention, not assumed.across_iterations
        self._tabulate()

    # -- LatencyModel -----------------------------------------------------------------------------------------------

    def token_s(self, first: int, last: int) -> Seconds:
        """Return the seconds of all layers' products, and of the LM head for one row."""
        if last < self._rows_s.size:
            return self._rows_s[first : last + 1]
        rows = np.arange(first, last + 1, dtype=np.float64)
        # Beyond the table: the mean slope of its last 1,024 rows.
        slope = float(self._rows_s[-1] - self._rows_s[-1025]) / 1024.0
        inside = np.minimum(rows, self._rows_s.size - 1).astype(np.int64)
        return np.asarray(self._rows_s[inside] + slope * (rows - inside), dtype=np.float64)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        """Return the seconds of a chunk's attention over all layers."""
        if first == last < len(self._one):
            return np.array([self._one_s(past, first)])
        if last < self._own.size:
            tokens, own, fused = (table[first : last + 1] for table in (self._tokens, self._own, self._chunk_fused))
        else:
            tokens = np.arange(first, last + 1, dtype=np.float64)
            # Beyond MAX_CHUNK a chunk's attention within itself grows with the square; its queries are not on chip.
            own, fused = self._own[-1] * (tokens / (self._own.size - 1)) ** 2, np.zeros(tokens.size, dtype=bool)
        found = self._numbers(tokens, past, own, fused)
        return np.asarray(np.where(tokens > 0, found.seconds(self._bandwidth) * self._layers, 0.0), dtype=np.float64)

    def _one_s(self, past: int, tokens: int) -> float:
        """Return `chunk_s` of one size from the lines of `_lines`, in about a microsecond."""
        own_s, by_unit_s, softmax_s, softmax_by_past, moved, by_past, most_fill = self._one[tokens]
        units = tiles(self._model, self.setting.machine, past) if self.setting.assumed.mapper else past
        moved += by_past * past
        fill = min(moved, most_fill)
        busy_s = max(own_s + by_unit_s * units, softmax_s + softmax_by_past * past)
        return self._layers * (fill / self._bandwidth + max(busy_s, (moved - fill) / self._bandwidth))

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        """Return the seconds of decode attention without any KV prefetched: an upper bound."""
        return self._layers * max(kv_sum * self._kv_s, kv_sum * self._kv_bytes / self._bandwidth)

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """Ignore the measurement: this model does not learn."""

    # -- CoupledLatency ---------------------------------------------------------------------------------------------

    def whole_s(self, load: BatchLoad) -> float:
        """Return the seconds of a whole iteration, with KV prefetched as in `timeline.run`."""
        chunk = load.tokens - load.decodes
        decodes = load.decodes
        rows = chunk + (0 if not decodes else decodes if self._decode_rows is None else self._decode_rows)
        bandwidth, layers = self._bandwidth, self._layers
        if rows < self._most:
            products_s, idle, own_idle = self._products_s[rows], self._idle[rows], self._own_idle[rows]
        else:
            products_s = (self.rows_s(rows) - self._head_s) / layers
            idle, own_idle = self._idle[-1], self._own_idle[-1]
        seconds = layers * products_s + load.chunk_s + self._head_s
        if not decodes:
            return seconds
        moved = load.decode_kv * self._kv_bytes
        compute_s = load.decode_kv * self._kv_s
        # KV bytes that may be on chip before decode attention: the buffer's, at most one layer's.
        most = min(self._most_ahead, moved)
        hidden = first = 0.0
        if most:
            # New KV of decodes is written during the products and shortens HBM's idle time.
            written = decodes * self._written
            gap = self._chunk_idle(chunk, load) if chunk and self._in_attention else 0.0
            hidden = min(most, max(0.0, idle - written) + gap)
            first = min(most, max(0.0, own_idle - written) + gap) if self._cold else hidden
        return (
            seconds
            + (layers - 1) * max(compute_s, (moved - hidden) / bandwidth)
            + max(compute_s, (moved - first) / bandwidth)
        )

    def _chunk_idle(self, chunk: int, load: BatchLoad) -> float:
        """Return the bytes that HBM could move besides during one layer's prefill attention."""
        at = min(chunk, self._own.size - 1)
        moved = self._chunk_moved[at] + self._chunk_by_past[at] * load.chunk_past
        return max(0.0, load.chunk_s / self._layers * self._bandwidth - moved)

    # -- tables -----------------------------------------------------------------------------------------------------

    def _tabulate(self) -> None:
        setting, bandwidth = self.setting, self._bandwidth
        shape, machine, assumed = self._model, setting.machine, setting.assumed
        fused = [fused_of(setting, shape, rows) for rows in KNOTS]
        costs = products(setting, shape, KNOTS, [1] * len(KNOTS), fused)
        seconds, idle, own_idle = [], [], []
        for i, rows in enumerate(KNOTS):
            qkv, *after = costs[5 * i : 5 * i + 4]
            before = [qkv] + ([elementwise_cost(shape, machine, assumed, rows)] if assumed.elementwise_ops else [])
            seconds.append(sum(op.seconds(bandwidth) for op in (*before, *after)))
            own_idle.append(sum(op.idle_bytes(bandwidth) for op in before))
            idle.append(own_idle[-1] + sum(op.idle_bytes(bandwidth) for op in after))
        grid = np.arange(MOST_ROWS + 1, dtype=np.float64)
        dense = [np.interp(grid, (0, *KNOTS), (0.0, *values)) for values in (seconds, idle, own_idle)]
        self._head_s: float = costs[4].seconds(bandwidth) if assumed.lm_head else 0.0
        self._rows_s = np.asarray(dense[0] * self._layers + np.where(grid > 0, self._head_s, 0.0), dtype=np.float64)
        lists: list[list[float]] = [values.tolist() for values in dense]
        self._products_s, self._idle, self._own_idle = lists
        self._most = len(self._products_s)
        self._tokens = np.arange(MAX_CHUNK + 1, dtype=np.float64)
        self._own = _own_table(shape, machine, assumed.causal) if assumed.mapper else np.zeros(MAX_CHUNK + 1)
        # Chunks whose queries stay on chip: all up to the largest knot at which they fit.
        kept = [f.attention for f in fused]
        upto = max((rows for rows, keeps in zip(KNOTS, kept, strict=True) if keeps), default=0)
        self._chunk_fused = self._tokens <= upto
        found = self._numbers(self._tokens, 0, self._own, self._chunk_fused)
        self._chunk_moved: list[float] = np.asarray(found.moved).tolist()
        self._chunk_by_past: list[float] = np.broadcast_to(np.asarray(found.moved_by_past), self._tokens.shape).tolist()
        self._one = self._lines(found)

    def _lines(self, alone: ChunkNumbers) -> list[tuple[float, ...]]:
        """Return, by chunk size, attention's cost alone and per cached token (or tile of them).

        Empty without flash attention: scores that spill to HBM are not linear in the past."""
        setting = self.setting
        if not setting.techniques.flash_attention:
            return []
        far = 1 << 20
        units = tiles(self._model, setting.machine, far) if setting.assumed.mapper else far
        over = self._numbers(self._tokens, far, self._own, self._chunk_fused)
        double = setting.techniques.double_buffering
        columns = (
            alone.array_s,
            (over.array_s - alone.array_s) / units,
            alone.softmax_s,
            (over.softmax_s - alone.softmax_s) / far,
            alone.moved,
            alone.moved_by_past,
            over.fill if double else np.inf,
        )
        lists = [np.broadcast_to(np.asarray(c, dtype=np.float64), self._tokens.shape).tolist() for c in columns]
        return [(0.0,) * 7, *list(zip(*lists, strict=True))[1:]]

    def _numbers(self, tokens: Any, past: int, own: Any, fused: Any) -> ChunkNumbers:
        s = self.setting
        return chunk_numbers(self._model, s.machine, s.precision, s.assumed, s.techniques, tokens, past, own, fused)


def _decode_s_per_token(setting: OperatorSetting) -> float:
    """Return the seconds of decode attention per KV token and layer, on the assumed unit."""
    # From a long context, where all tiles but the last are full.
    shape, machine, _, assumed, _ = setting
    many = 1 << 20
    vector_s, array_s = (f(shape, machine, assumed, many) / many for f in (vector_seconds, array_seconds))
    return {"vector": vector_s, "array": array_s, "fastest": min(vector_s, array_s)}[assumed.decode_attention]


@cache
def _own_table(shape: ModelShape, machine: MachineModel, causal: bool) -> Seconds:
    """Return `own_cycles` of every chunk up to MAX_CHUNK."""
    return np.array([0.0] + [own_cycles(shape, machine, tokens, causal) for tokens in range(1, MAX_CHUNK + 1)])
