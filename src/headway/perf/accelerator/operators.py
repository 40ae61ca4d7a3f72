"""Operators of one layer (and the LM head) of a packed iteration, with their costs.

In order: elementwise work, the query-key-value product, the chunk's attention, decode attention, the output product,
up (gate and up together), down. An activation between two of them stays on chip where both its producer and its
consumer can hold their inputs and outputs beside a weight tile (operator fusion).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headway.perf.accelerator.assumptions import AcceleratorAssumptions
from headway.perf.accelerator.attention import chunk_attention, decode_attention, kv_bytes
from headway.perf.accelerator.cost import OpCost, none
from headway.perf.accelerator.iteration_work import IterationWork, TechniqueSet
from headway.perf.accelerator.machine_model import MachineModel
from headway.perf.accelerator.mapping import GemmShape, fusible, search
from headway.perf.accelerator.precision import OperandTypes
from headway.perf.hardware.shapes import ModelShape


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
        wanted = self.assumed.ffn_matrices
        if wanted is None or wanted == self.shape.mlp_matrices:
            return self.shape
        return ModelShape(
            **{**{f: getattr(self.shape, f) for f in self.shape.__struct_fields__}, "mlp_matrices": wanted}
        )


def rows_of(assumed: AcceleratorAssumptions, work: IterationWork) -> int:
    """Return the rows of a packed product: the chunk's tokens plus the decodes, or `decode_rows` where assumed."""
    decodes = 0 if not work.decodes else work.decodes if assumed.decode_rows is None else assumed.decode_rows
    return work.prefill_tokens + decodes


def layers_of(setting: OperatorSetting, works: Sequence[IterationWork]) -> list[LayerOperators]:
    """Return the operators of several iterations; all their products are mapped in one search."""
    shape, machine, precision, assumed, techniques = setting
    shape = setting.model
    rows = [rows_of(assumed, work) for work in works]
    # The LM head runs for each decode and for the chunk's last token.
    heads = [work.decodes + (1 if work.prefill_tokens else 0) for work in works]
    fused = [fused_of(setting, shape, m) for m in rows]
    costs = products(setting, shape, rows, heads, fused)
    layers = []
    for i, work in enumerate(works):
        qkv, out, up, down, head = costs[5 * i : 5 * i + 5]
        # Prefill's new KV is counted by its attention; decodes' by the QKV product.
        if assumed.decode_kv_written:
            qkv = qkv._replace(hbm_bytes=qkv.hbm_bytes + work.decodes * kv_bytes(shape, precision))
        chunk = chunk_attention(shape, machine, precision, assumed, techniques, work, fused[i].attention)
        decode = decode_attention(shape, machine, precision, assumed, work)
        elementwise = elementwise_cost(shape, machine, assumed, rows[i])
        before = (elementwise, qkv) if assumed.elementwise_ops else (qkv,)
        layers.append(
            LayerOperators(before, chunk, decode, (out, up, down), head if assumed.lm_head else none("LM head"))
        )
    return layers


class FusedActivations(NamedTuple):
    """Activations that stay on chip, by the operator that reads them."""

    qkv: bool
    attention: bool
    out: bool
    up: bool
    down: bool


def fused_of(setting: OperatorSetting, shape: ModelShape, rows: int) -> FusedActivations:
    """Return the operator fusion for so many rows.

    Without the mapper everything stays on chip, as in the paper's figures."""
    if setting.techniques.fusion == "off":
        return FusedActivations(False, False, False, False, False)
    if not setting.assumed.mapper:
        return FusedActivations(True, True, True, True, True)
    machine = setting.machine
    qkv, out, up, down = (fusible(machine, gemm) for gemm in gemms(setting, shape, rows))
    # Queries and outputs of attention may take half of the operand buffer.
    queries = rows * shape.q_width * setting.precision.activation_bytes
    attention = 2 * queries <= machine.compute_bytes / 2
    # Both the producer and the consumer of an activation must be able to keep it.
    return FusedActivations(down and qkv, qkv and attention, attention and out, out and up, up and down)


def gemms(
    setting: OperatorSetting, shape: ModelShape, rows: int, fused: FusedActivations | None = None
) -> list[GemmShape]:
    """Return the four products of a layer: qkv, out, up, down."""
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
    setting: OperatorSetting,
    shape: ModelShape,
    rows: Sequence[int],
    heads: Sequence[int],
    fused: Sequence[FusedActivations],
) -> list[OpCost]:
    """Return the costs of each iteration's four products and its LM head, flat: five entries an iteration."""
    w, a = setting.precision.weight_bytes, setting.precision.activation_bytes
    wanted = []
    for m, h, f in zip(rows, heads, fused, strict=True):
        wanted += gemms(setting, shape, m, f)
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


def elementwise_cost(shape: ModelShape, machine: MachineModel, assumed: AcceleratorAssumptions, rows: int) -> OpCost:
    """Return the vector unit's cost of norms, residuals, rotations and the activation in one layer."""
    # Two norms and two residuals of the hidden state, rotated queries and keys, the activation.
    elements = rows * (4 * shape.hidden + shape.rotary_width + shape.mlp)
    return OpCost(
        "elementwise", "vector", assumed.elementwise_ops * elements / (machine.vector_lanes * machine.clock_hz), 0.0
    )
