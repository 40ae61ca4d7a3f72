"""How long a prompt's chunk takes on a group of instances: the question that cluster policies and their simulator ask.

A group is a ring of `sp` instances over `nodes` nodes; how its layers are spread is the span's strategy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from headway.core.span import Strategy

LOCAL = Strategy()


class GroupShape(NamedTuple):
    """sp: instances in the group; nodes: how many nodes they lie on."""

    sp: int
    nodes: int = 1
    strategy: Strategy = LOCAL


class GroupLatency(Protocol):
    """Predicted seconds of a chunk's prefill. Pure."""

    @property
    def source(self) -> str:
        """Where the numbers come from, in words."""

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        """`tokens` tokens over `past` cached ones, on the whole group together."""

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        """The most tokens over `past` whose prefill takes at most `budget_s`; 0 when none does."""


def batch_s(latency: GroupLatency, parts: Iterable[tuple[int, int]], group: GroupShape) -> float:
    """Seconds of several prompts' chunks, as (past, tokens), computed as one batch on a group: their sum, but what a
    chunk takes however short it is (a single token's time) is paid once. Exact for models that are a constant plus a
    sum over tokens, as LoongServe's (§5.5) and Eq. (1) are."""
    times = [latency.prefill_s(past, tokens, group) for past, tokens in parts]
    if len(times) < 2:
        return sum(times)
    return max(max(times), sum(times) - (len(times) - 1) * latency.prefill_s(0, 1, group))
