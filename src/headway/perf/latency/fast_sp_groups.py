"""Prefill times of groups under fast sequence parallelism, for placement policies and the cluster simulator.

One instance: its own latency model. Several: `fast_sp`'s formulas, in the form of the span's strategy (`ring` and
`local` count as Megatron with tp 1). A chunk over cached tokens costs the difference of two whole prefills.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.core.span import Strategy
from headway.perf.hardware.links import NetworkLink
from headway.perf.hardware.shapes import ModelShape, causal_pairs, matmul_flops
from headway.perf.latency.base import LatencyModel, one_chunk_s
from headway.perf.latency.fast_sp import AcceleratorGroup, Form, SpRates, attention_stage, mlp_stage
from headway.perf.latency.groups import GroupLatency, GroupShape

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
        """See GroupLatency."""
        if group.sp == 1:
            return self._single.prefill_s(past, tokens, group)
        return self._whole_s(past + tokens, group) - (self._whole_s(past, group) if past else 0.0)

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        """See GroupLatency."""
        return most_tokens(lambda tokens: self.prefill_s(past, tokens, group) <= budget_s)

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
    pairs_s = max(one_chunk_s(instance, 0, RATED_ROWS), 1e-12)
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


def most_tokens(fits: Callable[[int], bool], limit: int = 1 << 24) -> int:
    """Return the largest number of tokens up to `limit` that `fits`, a monotone predicate; 0 when none does."""
    # Invariant: `low` fits (or is 0), `high` does not (or is limit + 1).
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
