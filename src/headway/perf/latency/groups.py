"""Latency interface of a group of instances: prefill time of a chunk, for cluster policies and the simulator.

A group is a ring of `sp` instances over `nodes` nodes; the span's strategy defines how layers are computed on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from headway.core.span import Strategy

LOCAL = Strategy()


class GroupShape(NamedTuple):
    """Size and strategy of a group of instances."""

    sp: int
    """Instances in the group."""
    nodes: int = 1
    """Nodes that they are spread over."""
    strategy: Strategy = LOCAL


class GroupLatency(Protocol):
    """Predicted seconds of a chunk's prefill. Pure: equal arguments give equal results."""

    @property
    def source(self) -> str:
        """Origin of the numbers, in words."""

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        """Return the seconds of `tokens` tokens over `past` cached ones, computed by the whole group together."""

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        """Return the most tokens over `past` whose prefill takes at most `budget_s`; 0 when none does."""


def batch_s(latency: GroupLatency, parts: Iterable[tuple[int, int]], group: GroupShape) -> float:
    """Return the seconds of several prompts' chunks, as (past, tokens), computed as one batch on a group.

    The sum of their times, with the fixed part of a chunk (a single token's time) counted once. Exact for models that
    are a constant plus a sum over tokens, as LoongServe's (§5.5) and Eq. (1) are."""
    times = [latency.prefill_s(past, tokens, group) for past, tokens in parts]
    if len(times) < 2:
        return sum(times)
    # A batch is never faster than its slowest chunk alone, also where the model is no constant plus a sum.
    return max(max(times), sum(times) - (len(times) - 1) * latency.prefill_s(0, 1, group))
