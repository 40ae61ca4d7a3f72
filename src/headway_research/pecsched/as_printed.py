"""Fast SP's cost as PecSched §5.3 prints it, for comparison with `fast_sp`, which Headway uses.

Departures of the printed formulas from the computation and communication of the two forms:

1. Megatron's attention, 4 (s T)² d / T, is one step of its ring: the G / T steps over the node's TP regions are
   missing, while Ulysses' 4 (s G)² d / G covers the node. Both attend to the same pairs: the totals must be equal.
2. Megatron's QKV product has a 1 / T too many: a region multiplies s T tokens with 1 / T of the weights.
3. QKV products and weights count N_h + N_kv heads; keys and values are both N_kv.
4. The MLP is 4 d wide with two matrices (8 d², 16 s d²); the models of Table 5 are gated with their own widths: 3 d ff.
5. No causal half, and no factor for the ring between nodes.
6. Volumes are elements of a whole node, taken over one link here; each of the G accelerators has its own.
7. §4.2 describes Megatron under Ulysses' name and the reverse (the formulas have them right).

Ring hops between nodes are not in the formulas at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.perf.hardware import ModelShape
from headway.perf.latency.fast_sp import FORMS, AcceleratorGroup, Form, SpPlan, SpRates


def attention_flops(form: Form, shape: ModelShape, group: AcceleratorGroup, tokens: int) -> float:
    """Return the printed FLOPs of one accelerator and layer for attention with its projections."""
    s, d, t, g = tokens / group.accelerators, shape.hidden, group.tp, group.in_node
    heads = (shape.q_heads + shape.kv_heads) * shape.head_dim
    if form == "megatron":
        return 2 * s * d * heads / t + 4 * (s * t) ** 2 * d / t + 2 * s * d * d
    return 2 * s * d * heads + 4 * (s * g) ** 2 * d / g + 2 * s * d * d


def attention_elements(form: Form, shape: ModelShape, group: AcceleratorGroup, tokens: int) -> float:
    """Return the printed number of elements that a node communicates in one layer's attention."""
    s, d, t, g = tokens / group.accelerators, shape.hidden, group.tp, group.in_node
    heads = (shape.q_heads + shape.kv_heads) * shape.head_dim
    if form == "megatron":
        return 2 * s * d * (t - 1) * g
    return 2 * s * heads * (g - 1) + (d * heads + d * d) * g * (t - 1) / t


def mlp_flops(shape: ModelShape, group: AcceleratorGroup, tokens: int) -> float:
    """Return the printed FLOPs of one accelerator and layer for the MLP."""
    return 16 * tokens / group.accelerators * shape.hidden**2


def mlp_elements(form: Form, shape: ModelShape, group: AcceleratorGroup, tokens: int) -> float:
    """Return the printed number of elements that a node communicates in one layer's MLP."""
    s, d, t, g = tokens / group.accelerators, shape.hidden, group.tp, group.in_node
    return 2 * s * d * (t - 1) * g if form == "megatron" else 8 * d * d * (t - 1) * g / t


def plans(shape: ModelShape, rates: SpRates, group: AcceleratorGroup, tokens: int) -> Iterator[SpPlan]:
    """Yield all four combinations, with seconds from the printed FLOPs and volumes."""
    # Seconds per element over one link: the paper's volumes are a whole node's (fault 6 above).
    link_s = shape.dtype_bytes / (rates.inside.bytes_per_s * rates.inside.efficiency)
    for attn in FORMS:
        for mlp in FORMS:
            flops = attention_flops(attn, shape, group, tokens) + mlp_flops(shape, group, tokens)
            moved = attention_elements(attn, shape, group, tokens) + mlp_elements(mlp, shape, group, tokens)
            exposed_s = shape.layers * moved * link_s
            yield SpPlan(attn, mlp, shape.layers * flops / rates.linear_flops + exposed_s, exposed_s)


def fastest(shape: ModelShape, rates: SpRates, group: AcceleratorGroup, tokens: int) -> SpPlan:
    """Return the combination that is fastest by the printed formulas."""
    return min(plans(shape, rates, group, tokens), key=lambda plan: plan.seconds)
