"""How many replicas does a long request get, and in which form is it computed on them?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from headway.core.span import Strategy
from headway.perf.latency.groups import LOCAL, GroupShape
from headway.policy.placement.registry import PolicyContext

_GRAIN = 1024


class StrategyChoice(NamedTuple):
    """A strategy and what the whole prefill is predicted to take with it; edge_s: between two places where it can be
    paused, at most."""

    strategy: Strategy
    seconds: float
    edge_s: float


class StrategyChooser:
    """Fast SP's choice (§5.3) by predicted time, or plain ring attention; remembered, lengths rounded up to 1,024."""

    def __init__(self, around: PolicyContext, tp: int, fast: bool) -> None:
        self._around, self._tp, self._fast = around, tp, fast
        self._known: dict[tuple[int, int, int], StrategyChoice] = {}

    def choose(self, tokens: int, replicas: int, nodes: int) -> StrategyChoice:
        """For a prompt on so many replicas, over so many nodes."""
        key = (-(-tokens // _GRAIN), replicas, nodes)
        known = self._known.get(key)
        if known is None:
            most = key[0] * _GRAIN
            groups = [GroupShape(replicas, nodes, form) for form in self._allowed(replicas)]
            seconds = [self._around.latency.prefill_s(0, most, group) for group in groups]
            best = min(range(len(groups)), key=seconds.__getitem__)
            edge_s = self._around.edge_s(0, most, groups[best], seconds[best])
            known = self._known[key] = StrategyChoice(groups[best].strategy, seconds[best], edge_s)
        return known

    def _allowed(self, replicas: int) -> Iterator[Strategy]:
        if replicas == 1:
            yield LOCAL
        elif self._tp == 1:
            yield Strategy(attn="ring")
            if self._fast:
                yield Strategy(attn="ulysses")
        else:
            yield Strategy(attn="megatron", mlp="megatron")
            if self._fast:
                yield Strategy(attn="megatron", mlp="ulysses")
                yield Strategy(attn="ulysses", mlp="megatron")
                yield Strategy(attn="ulysses", mlp="ulysses")


class GroupSizing:
    """`long_replicas` as a rule."""

    def __init__(
        self,
        rule: Literal["memory", "latency", "fixed"],
        forms: StrategyChooser,
        capacity: int,
        most: int,
        per_node: int,
        target_s: float,
        fixed: int,
    ) -> None:
        """capacity: KV tokens of one replica (0: unlimited). most: replicas that there are; per_node: in one node."""
        self._rule, self._forms = rule, forms
        self._capacity, self._most, self._per_node = capacity, most, max(1, per_node)
        self._target_s, self._fixed = target_s, fixed
        self._fitting: dict[int, int] = {}

    def replicas(self, prompt: int, whole: int) -> int:
        """For a request of `prompt` tokens, `whole` with its output; 0 when all replicas together cannot hold it."""
        least = -(-whole // self._capacity) if self._capacity else 1
        if least > self._most:
            return 0
        if self._rule == "memory":
            return least
        wanted = self._fixed if self._rule == "fixed" else self._fast_enough(-(-prompt // _GRAIN))
        return max(least, min(wanted, self._most))

    def _fast_enough(self, grains: int) -> int:
        """The fewest that keep the target; all when none do."""
        known = self._fitting.get(grains)
        if known is None:
            low, high = 1, self._most
            while low < high:
                middle = (low + high) // 2
                nodes = -(-middle // self._per_node)
                fits = self._forms.choose(grains * _GRAIN, middle, nodes).seconds <= self._target_s
                low, high = (low, middle) if fits else (middle + 1, high)
            known = self._fitting[grains] = low
        return known
