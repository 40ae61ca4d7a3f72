"""Prefill time of a long prompt under PecSched's fast sequence parallelism (§5.3), and of groups for placement
policies.

Inside a node attention and MLP each take one of two forms; between nodes KV is passed round a ring:

megatron   attention: activations are gathered and scattered inside a tensor-parallel (TP) region, KV goes round a ring
           of all TP regions; MLP: activations are gathered and scattered. With tp 1 this is plain ring attention.
ulysses    attention: heads are exchanged inside the node (all-to-all), KV goes round a ring of nodes; with tp > 1 every
           accelerator first gathers the stage's whole weights. MLP: weights are gathered, activations stay.

The paper's formulas are corrected here; `headway_research.pecsched.fast_sp` keeps them and lists their faults. Per
accelerator, s = tokens / accelerators: matrix products 2 s d (N_h + 2 N_kv) d_h, 2 s N_h d_h d and 2 s · 3 d ff (gated
MLP) under both forms; causal attention 2 s² N_h d_h · accelerators under both: the ring's steps, over TP regions or
nodes, always cover the whole prompt. Volumes are counted per link. A ring's hop overlaps with the step's arithmetic;
nothing else overlaps.

At great lengths the forms differ mainly by the efficiency of attention kernels in a ring: `ring_loss` is the share lost
per doubling of the ring, as measured on eight A100 (`perf.latency.groups`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from headway.core.errors import ConfigError
from headway.core.request import Strategy
from headway.perf.hardware import AcceleratorSpec, ModelShape, NetworkLink, causal_pairs, matmul_flops
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.groups import RING_LOSS, GroupLatency, GroupShape, largest, ring_share

Form = Literal["megatron", "ulysses"]
FORMS: tuple[Form, Form] = ("megatron", "ulysses")


class SpRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates that one accelerator and its links reach, after efficiencies."""

    linear_flops: float
    """FLOP/s of matrix products."""
    attention_flops: float
    """FLOP/s of attention without a ring."""
    bandwidth: float
    """HBM bytes/s."""
    inside: NetworkLink
    """Link of one accelerator inside a node."""
    node: NetworkLink
    """Network of one whole node, shared by its accelerators."""
    ring_loss: float = RING_LOSS
    """Share of attention's rate lost per doubling of the ring (see the module's docstring)."""

    @classmethod
    def of(
        cls,
        device: AcceleratorSpec,
        node_gbit_s: float | None = None,
        linear: float = 0.7,
        attention: float = 0.6,
        bandwidth: float = 0.85,
    ) -> SpRates:
        """Return rates as shares (`linear`, `attention`, `bandwidth`) of the data sheet's peaks.

        node_gbit_s: a whole node's network in Gbit/s; None: one network card per accelerator."""
        card = device.across
        whole = card.bytes_per_s * device.per_node if node_gbit_s is None else node_gbit_s * 1e9 / 8
        node = msgspec.structs.replace(card, name=f"{card.name} of a node", bytes_per_s=whole)
        return cls(
            linear_flops=device.flops * linear,
            attention_flops=device.flops * attention,
            bandwidth=device.bandwidth * bandwidth,
            inside=device.inside,
            node=node,
        )

    def attention_rate(self, ring: float) -> float:
        """Return the FLOP/s of attention in a ring of so many members (1: no ring)."""
        return self.attention_flops * ring_share(ring, self.ring_loss)


class AcceleratorGroup(msgspec.Struct, frozen=True):
    """Accelerators of one long prefill: `replicas` × `tp` of them, spread evenly over `nodes` nodes."""

    replicas: int
    nodes: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.replicas, self.nodes, self.tp) < 1 or self.nodes > self.replicas:
            raise ConfigError(
                f"{self.replicas} replicas of TP{self.tp} on {self.nodes} nodes: at least 1 each, no node empty"
            )

    @property
    def accelerators(self) -> int:
        return self.replicas * self.tp

    @property
    def in_node(self) -> float:
        """Accelerators a node, on average."""
        return self.accelerators / self.nodes


class StageCost(NamedTuple):
    """Seconds of one layer's attention or MLP on the slowest accelerator."""

    compute_s: float
    """Arithmetic; a ring step counts as its hop where the hop is longer."""
    exposed_s: float
    """Communication that no arithmetic overlaps."""

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s


class SpPlan(NamedTuple):
    """A combination of forms and the cost of the whole prefill with it."""

    attn: Form
    mlp: Form
    seconds: float
    """All layers."""
    exposed_s: float
    """Communication in it that no arithmetic overlaps."""

    def strategy(self, tp: int) -> Strategy:
        """Return it as a span's strategy: Megatron attention without tensor parallelism is a plain ring."""
        if tp > 1:
            return Strategy(attn=self.attn, mlp=self.mlp)
        return Strategy(attn="ulysses" if self.attn == "ulysses" else "ring", mlp="local")


def attention_stage(form: Form, shape: ModelShape, rates: SpRates, group: AcceleratorGroup, tokens: int) -> StageCost:
    """Return the cost of one layer's causal attention with its projections, for a prompt of `tokens`."""
    s, tp, size = tokens / group.accelerators, group.tp, shape.dtype_bytes
    d, head = shape.hidden, shape.head_dim
    weights = shape.attention_parameters
    if form == "megatron":
        products_s = _products_s(rates, matmul_flops(s, weights), weights / tp * size)
        # All-gather of the region's activations before QKV and reduce-scatter after the output product.
        exposed_s = _gathered_s(rates.inside, 2 * s * d * (tp - 1) * size, 2, tp)
        kv = s * tp * 2 * _heads(shape.kv_heads, tp) * head * size  # one rank's, of its region's tokens
        flops = _attention_flops(s, shape.q_heads, head, group)
        hop = (kv, kv * tp)
        ring: float = group.replicas
    else:
        products_s = _products_s(rates, matmul_flops(s, weights), weights * size)
        # Gather the stage's weights (QKV and output matrices) from the tensor-parallel peers.
        exposed_s = _gathered_s(rates.inside, weights * (tp - 1) / tp * size, 2, tp)
        ranks = group.in_node
        # Padded head counts: the fullest rank sets the time, and heads are copied where ranks outnumber them.
        q, kv_heads = _heads(shape.q_heads, ranks) * ranks, _heads(shape.kv_heads, ranks) * ranks
        exposed_s += _gathered_s(rates.inside, 2 * s * (q + kv_heads) * head * (ranks - 1) / ranks * size, 2, ranks)
        kv = s * 2 * kv_heads * head * size  # one rank's share of heads, of the node's tokens
        flops = _attention_flops(s, q, head, group)
        hop = (kv, kv * ranks)
        ring = group.nodes
    # The last of `ring` steps passes nothing on, so `ring` - 1 steps take the longer of arithmetic and hop.
    step_s = flops / rates.attention_rate(ring) / ring
    hop_s = _hop_s(rates, group, hop, ring)
    return StageCost(products_s + step_s + (ring - 1) * max(step_s, hop_s), exposed_s)


def mlp_stage(form: Form, shape: ModelShape, rates: SpRates, group: AcceleratorGroup, tokens: int) -> StageCost:
    """Return the cost of one layer's MLP, for a prompt of `tokens`."""
    s, tp, size = tokens / group.accelerators, group.tp, shape.dtype_bytes
    weights = shape.mlp_parameters
    if form == "megatron":
        moved = 2 * s * shape.hidden * (tp - 1)
        return StageCost(
            _products_s(rates, matmul_flops(s, weights), weights / tp * size),
            _gathered_s(rates.inside, moved * size, 2, tp),
        )
    moved = weights * (tp - 1) / tp
    return StageCost(
        _products_s(rates, matmul_flops(s, weights), weights * size), _gathered_s(rates.inside, moved * size, 1, tp)
    )


def plans(shape: ModelShape, rates: SpRates, group: AcceleratorGroup, tokens: int) -> Iterator[SpPlan]:
    """Yield all four combinations, Megatron attention with Megatron MLP first."""
    attention = {form: attention_stage(form, shape, rates, group, tokens) for form in FORMS}
    mlp = {form: mlp_stage(form, shape, rates, group, tokens) for form in FORMS}
    for attn, a in attention.items():
        for linear, m in mlp.items():
            seconds = shape.layers * (a.total_s + m.total_s)
            yield SpPlan(attn, linear, seconds, shape.layers * (a.exposed_s + m.exposed_s))


def fastest(shape: ModelShape, rates: SpRates, group: AcceleratorGroup, tokens: int) -> SpPlan:
    """Return fast SP's choice: the fastest combination, Megatron where times are equal."""
    return min(plans(shape, rates, group, tokens), key=lambda plan: plan.seconds)


def plain_ring(shape: ModelShape, rates: SpRates, group: AcceleratorGroup, tokens: int) -> SpPlan:
    """Return ring attention over TP regions, as the baselines and PecSched's ablation /FSP use it."""
    # `plans` yields Megatron for both first.
    return next(plans(shape, rates, group, tokens))


def saved_bytes(shape: ModelShape, tokens: int, layers_done: int) -> tuple[int, int]:
    """Return the bytes that a prefill paused between layers keeps (§5.1): (KV of finished layers, activations).

    The paper pauses between any two kernels; between layers only the hidden state of every token is live."""
    return shape.layer_kv_bytes * layers_done * tokens, tokens * shape.hidden * shape.dtype_bytes


def _attention_flops(s: float, q_heads: float, head_dim: int, group: AcceleratorGroup) -> float:
    """Return one accelerator's FLOPs of one layer's causal attention: its s rows against half of the whole prompt.

    The diagonal is left out."""
    # s rows × (s·accelerators / 2) keys × 4 FLOPs a head dimension (`DecoderShape.pair_flops`).
    return 2 * s * s * q_heads * head_dim * group.accelerators


def _heads(heads: int, ranks: float) -> int:
    """Return the heads on the fullest rank: heads are not split, and copied where ranks outnumber them."""
    return max(1, math.ceil(heads / ranks))


def _products_s(rates: SpRates, flops: float, weight_bytes: float) -> float:
    return max(flops / rates.linear_flops, weight_bytes / rates.bandwidth)


def _gathered_s(link: NetworkLink, count: float, messages: int, ranks: float) -> float:
    """Return the seconds of `messages` collectives with `count` bytes in all in or out of one rank; 0 for one rank."""
    return messages * link.latency_s + count / (link.bytes_per_s * link.efficiency) if ranks > 1 else 0.0


def _hop_s(rates: SpRates, group: AcceleratorGroup, count: tuple[float, float], ring: float) -> float:
    """Return the seconds of one ring step: the slower of the link inside a node and the network between nodes.

    count: bytes that (one rank sends over its link, cross one node's edge over the node's network)."""
    if ring <= 1:
        return 0.0
    # Hops inside a node exist only where a node holds more than one member of the ring.
    slowest = _gathered_s(rates.inside, count[0], 1, 2) if ring > group.nodes else 0.0
    return max(slowest, _gathered_s(rates.node, count[1], 1, 2)) if group.nodes > 1 else slowest


# Prefill times of groups under fast sequence parallelism, for placement policies and the cluster simulator.
#
# One instance: its own latency model. Several: `fast_sp`'s formulas, in the form of the span's strategy (`ring` and
# `local` count as Megatron with tp 1). A chunk over cached tokens costs the difference of two whole prefills.

RATED_ROWS = 2048
"""Rows of the chunk from whose time `measured_rates` takes an instance's rates."""


class FastSpLatency:
    """`GroupLatency` of fast sequence parallelism over instances of `tp` accelerators each."""

    def __init__(self, single: GroupLatency, shape: ModelShape, rates: SpRates, tp: int = 1) -> None:
        """single: model of groups of one instance."""
        self._single, self._shape, self._rates, self._tp = single, shape, rates, tp
        self._known: dict[tuple[int, GroupShape], float] = {}

    @property
    def source(self) -> str:
        loss = self._rates.ring_loss
        return (
            f"groups: PecSched's fast-SP formulas, corrected, a doubling of the ring costs {loss:.1%} of attention; "
            f"one instance: {self._single.source}"
        )

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        if group.sp == 1:
            return self._single.prefill_s(past, tokens, group)
        return self._whole_s(past + tokens, group) - (self._whole_s(past, group) if past else 0.0)

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        return largest(lambda tokens: self.prefill_s(past, tokens, group), budget_s)

    def _whole_s(self, tokens: int, group: GroupShape) -> float:
        key = (tokens, group)
        known = self._known.get(key)
        if known is None:
            # Each instance is one replica of `tp` accelerators.
            ring = AcceleratorGroup(group.sp, group.nodes, self._tp)
            attn, mlp = forms(group.strategy)
            attention = attention_stage(attn, self._shape, self._rates, ring, tokens)
            rest = mlp_stage(mlp, self._shape, self._rates, ring, tokens)
            # Bound the memory of long simulations; entries are cheap to compute again.
            if len(self._known) > 1 << 16:
                self._known.clear()
            known = self._known[key] = self._shape.layers * (attention.total_s + rest.total_s)
        return known


def measured_rates(
    instance: LatencyModel, shape: ModelShape, inside: NetworkLink, across: NetworkLink, tp: int = 1
) -> SpRates:
    """Return the rates of one accelerator that an instance's own measured times imply: its linear layers and attention
    on a chunk of `RATED_ROWS` rows, and its bandwidth from one row, whose time is that of reading the weights.

    No share is lost to the ring: published losses are of GPU kernels."""
    linear_s = instance.rows_s(RATED_ROWS)
    pairs_s = max(instance.attention_s(0, RATED_ROWS), 1e-12)
    weights = shape.layers * shape.layer_parameters
    return SpRates(
        linear_flops=matmul_flops(RATED_ROWS, weights) / tp / linear_s,
        attention_flops=shape.layers * shape.pair_flops * causal_pairs(RATED_ROWS, 0) / tp / pairs_s,
        bandwidth=weights * shape.dtype_bytes / tp / instance.rows_s(1),
        inside=inside,
        node=across,
        ring_loss=0.0,
    )


def forms(strategy: Strategy) -> tuple[Form, Form]:
    """Return the (attention, MLP) forms of a span's strategy."""
    return (
        "ulysses" if strategy.attn == "ulysses" else "megatron",
        "ulysses" if strategy.mlp == "ulysses" else "megatron",
    )
