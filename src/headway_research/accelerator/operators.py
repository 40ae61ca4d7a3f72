"""Operators of one layer (and the LM head) of a packed iteration, with their costs.

In order: elementwise work, the query-key-value product, the chunk's attention, decode attention, the output product,
up (gate and up together), down. An activation between two of them stays on chip where both its producer and its
consumer can hold their inputs and outputs beside a weight tile (operator fusion).

In attention keys and values are the stationary operand: for each KV head, ceil(d/R) · ceil(tokens/C) tiles of keys and
ceil(tokens/R) · ceil(d/C) of values. The rows of the head's group of query heads stream through each tile; under
`causal` only the rows at or after a tile do. The softmax of a chunk runs on the vector unit at the same time; decode
attention runs on either unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headway.perf.hardware import ModelShape, causal_pairs
from headway_research.accelerator.machine import (
    AcceleratorAssumptions,
    IterationWork,
    MachineModel,
    OperandTypes,
    TechniqueSet,
)
from headway_research.accelerator.mapping import GemmShape, OpCost, fusible, none, search


class OperatorSetting(NamedTuple):
    """Everything that a cost depends on except the work; hashable, so that results can be cached."""

    shape: ModelShape
    machine: MachineModel
    precision: OperandTypes = OperandTypes()
    assumed: AcceleratorAssumptions = AcceleratorAssumptions()
    techniques: TechniqueSet = TechniqueSet()

    @property
    def model(self) -> ModelShape:
        """The shape with the assumed number of feed-forward matrices."""
        return msgspec.structs.replace(self.shape, mlp_matrices=self.assumed.ffn_matrices or self.shape.mlp_matrices)

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values that one token leaves in one layer, with the precision of KV."""
        return self.shape.kv_width * self.precision.kv_bytes

    @property
    def query_bytes(self) -> float:
        """Bytes of one token's queries in one layer."""
        return self.shape.q_width * self.precision.activation_bytes


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


def chunk_numbers(setting: OperatorSetting, tokens: Any, past: int, own: Any, fused: Any) -> ChunkNumbers:
    """Return the costs of a chunk of `tokens` (a number or an array) over `past` cached tokens.

    own: its `own_cycles`. fused: queries come from, and outputs go to, on-chip memory."""
    shape, machine, precision, assumed, techniques = setting
    pairs = causal_pairs(tokens, past) if assumed.causal else tokens * past + tokens * tokens * 1.0
    if assumed.mapper:
        streamed = np.maximum(shape.q_heads // shape.kv_heads * tokens, machine.rows)
        # A tile costs at least R cycles, the load of the next one. KV heads are spread over the arrays.
        cycles = (tiles(setting, past) * streamed + own) * (shape.kv_heads / machine.arrays)
        array_s = (cycles + machine.rows + machine.columns) / machine.clock_hz
    else:
        array_s = pairs * shape.pair_flops / (machine.flops * assumed.utilisation)
    scores = pairs * shape.q_heads
    softmax_s = assumed.softmax_ops * scores / (machine.vector_lanes * machine.clock_hz)
    queries = tokens * setting.query_bytes
    # Queries and FP32 outputs of one KV head's group are resident; where they are not, KV is read once a block.
    group = queries / shape.kv_heads * (1.0 + 4.0 / precision.activation_bytes)
    passes = np.maximum(1.0, np.ceil(group / (machine.compute_bytes / 2)))
    own_reads = passes if assumed.kv_reread else passes - 1.0
    moved = (past * passes + tokens * (own_reads + 1.0)) * setting.kv_bytes + np.where(fused, 0.0, 2.0 * queries)
    # Without flash attention scores that do not fit, one head's at a time, are written and read twice (raw, softmax).
    if not techniques.flash_attention:
        spilled = scores * precision.activation_bytes
        moved = moved + np.where(spilled / shape.q_heads > machine.compute_bytes / 2, 4.0 * spilled, 0.0)
    # First tiles of keys and values: all that the arrays wait for with double-buffering.
    first = 2.0 * machine.columns * shape.head_dim * precision.kv_bytes if assumed.mapper else 0.0
    fill = np.minimum(moved, first) if techniques.double_buffering else moved
    return ChunkNumbers(array_s, softmax_s, moved, passes * setting.kv_bytes, fill, group)


def chunk_attention(setting: OperatorSetting, work: IterationWork, fused: bool) -> OpCost:
    """Return the cost of a prefill chunk's attention over its history and itself, in one layer."""
    tokens, mapper = work.prefill_tokens, setting.assumed.mapper
    if not tokens:
        return none("prefill attention")
    own = own_cycles(setting, tokens) if mapper else 0.0
    found = chunk_numbers(setting, tokens, work.prefill_past, own, fused)
    queries = 2.0 * tokens * setting.query_bytes
    return OpCost(
        "prefill attention",
        "array",
        max(float(found.array_s), float(found.softmax_s)),
        float(found.moved),
        float(found.fill),
        min(float(found.group), setting.machine.compute_bytes / 2) + (queries if fused else 0.0),
        "keys and values stationary" if mapper else "",
    )


def decode_attention(setting: OperatorSetting, work: IterationWork) -> OpCost:
    """Return the cost of all decodes' attention in one layer; `hbm_bytes` is all KV they read, prefetched or not."""
    if not work.decodes:
        return none("decode attention", "vector")
    unit, seconds = attending_unit(setting, work.kv_tokens)
    return OpCost("decode attention", unit, seconds, work.kv_tokens * setting.kv_bytes, mapping=f"{unit} unit")


def attending_unit(setting: OperatorSetting, kv_tokens: int) -> tuple[str, float]:
    """Return the unit on which decodes attend to `kv_tokens`, and its seconds in one layer.

    Vector unit: scores and values are two multiply-accumulates a query head, dimension and token, one a lane and cycle.
    Arrays: a group of query heads streams through each tile, which costs at least R cycles."""
    shape, machine, _, assumed, _ = setting
    share = 1.0 if assumed.mapper else assumed.utilisation
    cycles = tiles(setting, kv_tokens) * max(shape.q_heads // shape.kv_heads, machine.rows)
    seconds = {
        "vector": 2.0 * kv_tokens * shape.q_width / (machine.vector_lanes * machine.clock_hz * share),
        "array": cycles * shape.kv_heads / (machine.arrays * machine.clock_hz * share),
    }
    choice = assumed.decode_attention
    unit = min(seconds, key=seconds.__getitem__) if choice == "fastest" else choice
    return unit, seconds[unit]


def tiles(setting: OperatorSetting, tokens: int) -> int:
    """Return the number of tiles of keys and of values of one KV head."""
    rows, columns, wide = setting.machine.rows, setting.machine.columns, setting.shape.head_dim
    return -(-wide // rows) * -(-tokens // columns) + -(-tokens // rows) * -(-wide // columns)


def own_cycles(setting: OperatorSetting, tokens: int) -> float:
    """Return the array cycles of a chunk's attention to itself, for one KV head."""
    shape, machine = setting.shape, setting.machine
    group = shape.q_heads // shape.kv_heads
    if not setting.assumed.causal:
        return float(tiles(setting, tokens) * max(group * tokens, machine.rows))
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


class LayerOperators(NamedTuple):
    """One layer's operators in order, and the LM head of the iteration."""

    before: tuple[OpCost, ...]
    """Operators before attention."""
    chunk: OpCost
    """Prefill attention."""
    decode: OpCost
    """Decode attention."""
    after: tuple[OpCost, ...]
    """Operators after attention."""
    head: OpCost
    """LM head, once an iteration."""

    @property
    def others(self) -> tuple[OpCost, ...]:
        """All operators of the layer but decode attention."""
        return (*self.before, self.chunk, *self.after)


def rows_of(assumed: AcceleratorAssumptions, work: IterationWork) -> int:
    """Return the rows of a packed product: the chunk's tokens plus the decodes, or `decode_rows` where assumed."""
    decodes = 0 if not work.decodes else work.decodes if assumed.decode_rows is None else assumed.decode_rows
    return work.prefill_tokens + decodes


def layers_of(setting: OperatorSetting, works: Sequence[IterationWork]) -> list[LayerOperators]:
    """Return the operators of several iterations; all their products are mapped in one search."""
    assumed = setting.assumed
    rows = [rows_of(assumed, work) for work in works]
    # The LM head runs for each decode and for the chunk's last token.
    heads = [work.decodes + (1 if work.prefill_tokens else 0) for work in works]
    fused = [fused_of(setting, m) for m in rows]
    costs = products(setting, rows, heads, fused)
    layers = []
    for i, work in enumerate(works):
        qkv, out, up, down, head = costs[5 * i : 5 * i + 5]
        # Prefill's new KV is counted by its attention; decodes' by the QKV product.
        if assumed.decode_kv_written:
            qkv = qkv._replace(hbm_bytes=qkv.hbm_bytes + work.decodes * setting.kv_bytes)
        layers.append(
            LayerOperators(
                (elementwise_cost(setting, rows[i]), qkv) if assumed.elementwise_ops else (qkv,),
                chunk_attention(setting, work, fused[i].attention),
                decode_attention(setting, work),
                (out, up, down),
                head if assumed.lm_head else none("LM head"),
            )
        )
    return layers


class FusedActivations(NamedTuple):
    """Activations that stay on chip, by the operator that reads them."""

    qkv: bool
    attention: bool
    out: bool
    up: bool
    down: bool


def fused_of(setting: OperatorSetting, rows: int) -> FusedActivations:
    """Return the operator fusion for so many rows.

    Without the mapper everything stays on chip, as in the paper's figures."""
    if setting.techniques.fusion == "off":
        return FusedActivations(False, False, False, False, False)
    if not setting.assumed.mapper:
        return FusedActivations(True, True, True, True, True)
    machine = setting.machine
    qkv, out, up, down = (fusible(machine, gemm) for gemm in gemms(setting, rows))
    # Queries and outputs of attention may take half of the operand buffer.
    attention = 2 * rows * setting.query_bytes <= machine.compute_bytes / 2
    # Both the producer and the consumer of an activation must be able to keep it.
    return FusedActivations(down and qkv, qkv and attention, attention and out, out and up, up and down)


def gemms(setting: OperatorSetting, rows: int, fused: FusedActivations | None = None) -> list[GemmShape]:
    """Return the four products of a layer: qkv, out, up, down."""
    shape = setting.model
    w, a = setting.precision.weight_bytes, setting.precision.activation_bytes
    (qkv_k, qkv_n), (out_k, out_n), (up_k, up_n), (down_k, down_n) = shape.qkv, shape.out, shape.up, shape.down
    f = fused or FusedActivations(False, False, False, False, False)
    return [
        GemmShape("qkv", rows, qkv_n, qkv_k, shape.q_width, w, a, f.qkv, f.attention),
        GemmShape("out", rows, out_n, out_k, shape.hidden, w, a, f.out, f.up),
        GemmShape("up", rows, up_n, up_k, shape.mlp, w, a, f.up, f.down),
        GemmShape("down", rows, down_n, down_k, shape.hidden, w, a, f.down, f.qkv),
    ]


def products(
    setting: OperatorSetting, rows: Sequence[int], heads: Sequence[int], fused: Sequence[FusedActivations]
) -> list[OpCost]:
    """Return the costs of each iteration's four products and its LM head, flat: five entries an iteration."""
    shape, w, a = setting.shape, setting.precision.weight_bytes, setting.precision.activation_bytes
    wanted = []
    for m, h, f in zip(rows, heads, fused, strict=True):
        wanted += gemms(setting, m, f)
        # Rows that yield a token are few: they stay on chip, and the sampler takes their scores from there.
        wanted.append(GemmShape("LM head", max(h, 1), shape.vocab, shape.hidden, 1, w, a, True, True))
    if setting.assumed.mapper:
        return search(wanted, setting.machine, setting.techniques.double_buffering)
    return [constant(gemm, setting) for gemm in wanted]


def constant(gemm: GemmShape, setting: OperatorSetting) -> OpCost:
    """Return the cost of a product without a mapping: weights read once, arrays at a constant share of their peak."""
    rate = setting.machine.flops * setting.assumed.utilisation
    moved = gemm.n * gemm.k * gemm.weight_bytes
    moved += 0.0 if gemm.input_on_chip else gemm.m * gemm.k * gemm.activation_bytes
    moved += 0.0 if gemm.output_on_chip else gemm.m * gemm.outputs * gemm.activation_bytes
    fill = 0.0 if setting.techniques.double_buffering else moved
    return OpCost(gemm.name, "array", 2.0 * gemm.m * gemm.n * gemm.k / rate, moved, fill)


def elementwise_cost(setting: OperatorSetting, rows: int) -> OpCost:
    """Return the vector unit's cost of norms, residuals, rotations and the activation in one layer."""
    shape, machine = setting.shape, setting.machine
    # Two norms and two residuals of the hidden state, rotated queries and keys, the activation.
    elements = rows * (4 * shape.hidden + shape.rotary_width + shape.mlp)
    seconds = setting.assumed.elementwise_ops * elements / (machine.vector_lanes * machine.clock_hz)
    return OpCost("elementwise", "vector", seconds, 0.0)
