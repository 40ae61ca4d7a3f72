"""How long a prompt's chunk takes on a group of instances: the question that cluster policies and their simulator ask.

A group is a ring of `sp` instances over `nodes` nodes; how its layers are spread is the span's strategy.
"""

from __future__ import annotations

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
