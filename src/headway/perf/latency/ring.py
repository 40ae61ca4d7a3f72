"""Prefill time of a chunk on a ring of instances, derived from one instance's latency model, for unmeasured groups.

Each instance computes its share of the rows and of causal attention, evenly (`striped`, or zigzag: `ring`; with
`contiguous` shares all wait for the last one, which attends to nearly all keys). A layer's attention has `sp` steps,
each the longer of computing a block and of passing a block's KV to the neighbour, and at least `step_s`, the fixed cost
of a step (Tetris's Table 1 implies 0.75 ms: its Eq. 1 constants are 24 ms an instance over 32 layers). Nothing overlaps
across layers.

Attention kernels reach less in a ring (`ring_share`): zig-zag ring attention on eight A100 reached 81.7% of eight
single-GPU FlashAttentions (zhuzilin/ring-flash-attention's table, forward only), so 6.1% a doubling of the ring; beyond
eight that is an extrapolation. Tetris's Table 1, whose times contain it, implies 2.9% a doubling at 16.
"""

from __future__ import annotations

import math

from headway.perf.hardware.links import NetworkLink
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.base import MAX_CHUNK, LatencyModel, one_chunk_s
from headway.perf.latency.groups import GroupShape

STEP_S = 7.5e-4
"""Least seconds of a ring step in one layer."""


RING_LOSS = 0.061
"""Share of attention's rate that is lost per doubling of the ring."""


def ring_share(members: float, loss: float = RING_LOSS) -> float:
    """Return the share of its rate that attention keeps in a ring of so many members (1: no ring)."""
    # 1 - loss·log2(members) reaches 0 at 2^16 members: keep a tenth
    return max(0.1, 1.0 - loss * math.log2(max(1.0, members)))


class RingLatency:
    """`GroupLatency` over one instance's `LatencyModel` (tp inside it included)."""

    def __init__(
        self,
        instance: LatencyModel,
        shape: ModelShape,
        inside: NetworkLink,
        across: NetworkLink,
        tp: int = 1,
        step_s: float = STEP_S,
        source: str = "",
        ring_loss: float = 0.0,
    ) -> None:
        """ring_loss: see `ring_share`; 0 where it is not measured."""
        self._instance, self._shape, self._tp, self._step_s = instance, shape, tp, step_s
        self._inside, self._across, self._ring_loss = inside, across, ring_loss
        self.source = source or f"derived: one instance's model on a ring, {step_s * 1e3:g} ms a ring step and layer"
        if not source and ring_loss:
            self.source += f", a doubling of the ring costs {ring_loss:.1%} of attention"

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        mine = -(-tokens // group.sp)
        # Beyond the range that models tabulate, rows scale linearly.
        rows = min(mine, 2 * MAX_CHUNK)
        rows_s = self._instance.rows_s(rows) * (mine / rows)
        attention_s = one_chunk_s(self._instance, past, tokens) / group.sp
        if group.strategy.attn == "contiguous" and group.sp > 1:
            attention_s *= _imbalance(past, tokens, group.sp)
        if group.sp == 1:
            return rows_s + attention_s
        attention_s /= ring_share(group.sp, self._ring_loss)
        layers, shape = self._shape.layers, self._shape
        # Bytes of one instance's share of KV, in one layer and on one tensor-parallel rank's link.
        block = (past + tokens) / group.sp * shape.kv_bytes_per_token / layers / self._tp
        link = self._inside if group.nodes == 1 else self._across
        step_s = max(attention_s / layers / group.sp, link.transfer_s(int(block)), self._step_s)
        return rows_s + layers * group.sp * step_s

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        return largest(lambda tokens: self.prefill_s(past, tokens, group), budget_s)


def _imbalance(past: int, tokens: int, sp: int) -> float:
    """Return the ratio of the last contiguous share's attention to the mean share's."""
    # Mean keys a row: past + tokens - mine/2 in the last share, past + tokens/2 over all.
    mine = tokens / sp
    return (past + tokens - mine / 2) / (past + tokens / 2)


def largest(seconds: object, budget_s: float, limit: int = 1 << 24) -> int:
    """Return the most tokens within a budget (0 when one token exceeds it); `seconds` must not fall with tokens."""
    assert callable(seconds)
    if seconds(1) > budget_s:
        return 0
    # Double until `high` is over the budget, then bisect; `low` always fits.
    low, high = 1, 2
    while high < limit and seconds(high) <= budget_s:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= budget_s else (low, middle)
    return low
