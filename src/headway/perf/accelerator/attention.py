"""Attention cost: a prefill chunk on the arrays with softmax concurrent on the vector unit; decodes on either unit.

Keys and values are the stationary operand: for each KV head, ceil(d/R) · ceil(tokens/C) tiles of keys and
ceil(tokens/R) · ceil(d/C) of values. The rows of the head's group of query heads stream through each tile; under
`causal` only the rows at or after a tile do.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from headway.perf.accelerator.assumptions import AcceleratorAssumptions
from headway.perf.accelerator.cost import OpCost, none
from headway.perf.accelerator.iteration_work import IterationWork, TechniqueSet
from headway.perf.accelerator.machine_model import MachineModel
from headway.perf.accelerator.precision import OperandTypes
from headway.perf.hardware.shapes import ModelShape, causal_pairs


def kv_bytes(shape: ModelShape, precision: OperandTypes) -> float:
    """Return the bytes of keys and values that one token leaves in one layer, with the precision of KV."""
    return shape.kv_width * precision.kv_bytes


class ChunkNumbers(NamedTuple):
    """One layer of a chunk's attention; each field is a number, or an array over chunk sizes."""

    array_s: Any
    """Seconds of the arrays."""
    softmax_s: Any
    """Seconds of the vector unit, concurrent with the arrays."""
    moved: Any
    """Bytes over HBM."""
    moved_by_past: Any
    """Bytes over HBM for each cached token."""
    fill: Any
    """Bytes of `moved` during which the units wait."""
    group: Any
    """Resident bytes of one KV head's queries and outputs."""

    def seconds(self, bandwidth: float) -> Any:
        """Return the layer's seconds at `bandwidth` bytes/s, as `OpCost.seconds` does."""
        rest_s = (self.moved - self.fill) / bandwidth
        return self.fill / bandwidth + np.maximum(np.maximum(self.array_s, self.softmax_s), rest_s)


def chunk_numbers(
    shape: ModelShape,
    machine: MachineModel,
    precision: OperandTypes,
    assumed: AcceleratorAssumptions,
    techniques: TechniqueSet,
    tokens: Any,
    past: int,
    own: Any,
    fused: Any,
) -> ChunkNumbers:
    """Return the costs of a chunk of `tokens` (a number or an array) over `past` cached tokens.

    own: its `own_cycles`. fused: queries come from, and outputs go to, on-chip memory."""
    pairs = causal_pairs(tokens, past) if assumed.causal else tokens * past + tokens * tokens * 1.0
    if assumed.mapper:
        streamed = np.maximum(shape.q_heads // shape.kv_heads * tokens, machine.rows)
        # A tile costs at least R cycles, the load of the next one. KV heads are spread over the arrays.
        cycles = (tiles(shape, machine, past) * streamed + own) * (shape.kv_heads / machine.arrays)
        array_s = (cycles + machine.rows + machine.columns) / machine.clock_hz
    else:
        array_s = pairs * shape.pair_flops / (machine.flops * assumed.utilisation)
    scores = pairs * shape.q_heads
    softmax_s = assumed.softmax_ops * scores / (machine.vector_lanes * machine.clock_hz)
    per_token = kv_bytes(shape, precision)
    queries = tokens * shape.q_width * precision.activation_bytes
    # Queries and FP32 outputs of one KV head's group are resident; where they are not, KV is read once a block.
    group = queries / shape.kv_heads * (1.0 + 4.0 / precision.activation_bytes)
    passes = np.maximum(1.0, np.ceil(group / (machine.compute_bytes / 2)))
    own_reads = passes if assumed.kv_reread else passes - 1.0
    moved = (past * passes + tokens * (own_reads + 1.0)) * per_token + np.where(fused, 0.0, 2.0 * queries)
    # Without flash attention scores that do not fit, one head's at a time, are written and read twice (raw, softmax).
    if not techniques.flash_attention:
        spilled = scores * precision.activation_bytes
        moved = moved + np.where(spilled / shape.q_heads > machine.compute_bytes / 2, 4.0 * spilled, 0.0)
    # First tiles of keys and values: all that the arrays wait for with double-buffering.
    first = 2.0 * machine.columns * shape.head_dim * precision.kv_bytes if assumed.mapper else 0.0
    fill = np.minimum(moved, first) if techniques.double_buffering else moved
    return ChunkNumbers(array_s, softmax_s, moved, passes * per_token, fill, group)


def chunk_attention(
    shape: ModelShape,
    machine: MachineModel,
    precision: OperandTypes,
    assumed: AcceleratorAssumptions,
    techniques: TechniqueSet,
    work: IterationWork,
    fused: bool,
) -> OpCost:
    """Return the cost of a prefill chunk's attention over its history and itself, in one layer."""
    tokens = work.prefill_tokens
    if not tokens:
        return none("prefill attention")
    own = own_cycles(shape, machine, tokens, assumed.causal) if assumed.mapper else 0.0
    found = chunk_numbers(shape, machine, precision, assumed, techniques, tokens, work.prefill_past, own, fused)
    queries = 2.0 * tokens * shape.q_width * precision.activation_bytes
    return OpCost(
        "prefill attention",
        "array",
        max(float(found.array_s), float(found.softmax_s)),
        float(found.moved),
        float(found.fill),
        min(float(found.group), machine.compute_bytes / 2) + (queries if fused else 0.0),
        "keys and values stationary" if assumed.mapper else "",
    )


def decode_attention(
    shape: ModelShape,
    machine: MachineModel,
    precision: OperandTypes,
    assumed: AcceleratorAssumptions,
    work: IterationWork,
) -> OpCost:
    """Return the cost of all decodes' attention in one layer; `hbm_bytes` is all KV they read, prefetched or not."""
    if not work.decodes:
        return none("decode attention", "vector")
    vector_s = vector_seconds(shape, machine, assumed, work.kv_tokens)
    array_s = array_seconds(shape, machine, assumed, work.kv_tokens)
    choice = assumed.decode_attention
    unit = ("vector" if vector_s <= array_s else "array") if choice == "fastest" else choice
    return OpCost(
        "decode attention",
        unit,
        vector_s if unit == "vector" else array_s,
        work.kv_tokens * kv_bytes(shape, precision),
        0.0,
        0.0,
        f"{unit} unit",
    )


def vector_seconds(shape: ModelShape, machine: MachineModel, assumed: AcceleratorAssumptions, kv_tokens: int) -> float:
    """Return the seconds of decode attention over `kv_tokens` on the vector unit, in one layer."""
    # Scores and values: two multiply-accumulates a query head, dimension and token; one a lane and cycle.
    rate = machine.vector_lanes * machine.clock_hz * (1.0 if assumed.mapper else assumed.utilisation)
    return 2.0 * kv_tokens * shape.q_width / rate


def array_seconds(shape: ModelShape, machine: MachineModel, assumed: AcceleratorAssumptions, kv_tokens: int) -> float:
    """Return the seconds of decode attention over `kv_tokens` on the arrays, in one layer.

    A group of query heads streams through each tile, which costs at least R cycles."""
    cycles = tiles(shape, machine, kv_tokens) * max(shape.q_heads // shape.kv_heads, machine.rows)
    return (
        cycles * shape.kv_heads / (machine.arrays * machine.clock_hz * (1.0 if assumed.mapper else assumed.utilisation))
    )


def tiles(shape: ModelShape, machine: MachineModel, tokens: int) -> int:
    """Return the number of tiles of keys and of values of one KV head."""
    rows, columns, wide = machine.rows, machine.columns, shape.head_dim
    return -(-wide // rows) * -(-tokens // columns) + -(-tokens // rows) * -(-wide // columns)


def own_cycles(shape: ModelShape, machine: MachineModel, tokens: int, causal: bool) -> float:
    """Return the array cycles of a chunk's attention to itself, for one KV head."""
    group = shape.q_heads // shape.kv_heads
    if not causal:
        return float(tiles(shape, machine, tokens) * max(group * tokens, machine.rows))
    total = 0.0
    # (tokens a tile spans, tiles side by side over the head dimension) of keys, then of values.
    for size, each in (
        (machine.columns, -(-shape.head_dim // machine.rows)),
        (machine.rows, -(-shape.head_dim // machine.columns)),
    ):
        count = -(-tokens // size)
        # Rows tokens - i·size stream through tile i: an arithmetic series down to where a tile costs R cycles.
        least = machine.rows / group
        full = min(count, max(0, math.floor((tokens - least) / size) + 1))
        series = group * (full * tokens - size * full * (full - 1) / 2)
        total += each * (series + (count - full) * machine.rows)
    return total
