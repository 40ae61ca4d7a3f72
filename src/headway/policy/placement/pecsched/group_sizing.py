"""Number of replicas for a long request, and the parallel strategy on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from headway.core.span import Strategy
from headway.perf.latency.groups import LOCAL, GroupShape
from headway.policy.placement.registry import PolicyContext

# tokens; prompts are rounded up to it, so that a trace of many lengths needs few predictions
_LENGTH_STEP = 1024


class StrategyChoice(NamedTuple):
    """The fastest strategy for a prompt on a group."""

    strategy: Strategy
    prefill_s: float
    """Predicted time of the whole prefill."""
    pause_interval_s: float
    """Longest time between two points where the prefill can be paused."""


class StrategyChooser:
    """Fast SP's choice (§5.3) by predicted time, or plain ring attention. Cached, with lengths rounded up to 1,024."""

    def __init__(self, context: PolicyContext, tp: int, fast: bool) -> None:
        self._context, self._tp, self._fast = context, tp, fast
        # by (rounded length, replicas, nodes, rounded cached tokens)
        self._known: dict[tuple[int, int, int, int], StrategyChoice] = {}

    def choose(self, tokens: int, replicas: int, nodes: int, cached: int = 0) -> StrategyChoice:
        """Return the choice for a prompt on so many replicas, over so many nodes, behind its first `cached` tokens."""
        key = (-(-tokens // _LENGTH_STEP), replicas, nodes, cached // _LENGTH_STEP)
        known = self._known.get(key)
        if known is None:
            most, past = key[0] * _LENGTH_STEP, key[3] * _LENGTH_STEP
            groups = [GroupShape(replicas, nodes, strategy) for strategy in self._allowed(replicas, nodes)]
            seconds = [self._context.latency.prefill_s(past, most - past, group) for group in groups]
            best = min(range(len(groups)), key=seconds.__getitem__)
            pause_interval_s = self._context.pause_interval_s(past, most, groups[best], seconds[best])
            known = self._known[key] = StrategyChoice(groups[best].strategy, seconds[best], pause_interval_s)
        return known

    def _allowed(self, replicas: int, nodes: int) -> Iterator[Strategy]:
        # groups that nodes share unevenly count as one node
        members = replicas // nodes if replicas % nodes == 0 else replicas
        ulysses = self._fast and self._context.exchanges_heads(self._tp, members)
        if replicas == 1:
            yield LOCAL
        elif self._tp == 1:
            yield Strategy(attn="ring")
            if ulysses:
                yield Strategy(attn="ulysses")
        else:
            # tensor-parallel replicas: strategies of attention and MLP are chosen separately (§5.3)
            yield Strategy(attn="megatron", mlp="megatron")
            if self._fast:
                yield Strategy(attn="megatron", mlp="ulysses")
            if ulysses:
                yield Strategy(attn="ulysses", mlp="megatron")
                yield Strategy(attn="ulysses", mlp="ulysses")


class GroupSizing:
    """The option `long_replicas`: how many replicas a long request gets."""

    def __init__(
        self,
        rule: Literal["memory", "latency", "fixed"],
        chooser: StrategyChooser,
        capacity: int,
        most: int,
        per_node: int,
        target_s: float,
        fixed: int,
    ) -> None:
        """capacity: KV tokens of one replica (0: unlimited). most: replicas in all; per_node: in one node. target_s:
        for the rule "latency"; fixed: replicas for the rule "fixed"."""
        self._rule, self._chooser = rule, chooser
        self._capacity, self._most, self._per_node = capacity, most, max(1, per_node)
        self._target_s, self._fixed = target_s, fixed
        # replicas that keep the target, by steps of the prompt's length
        self._fitting: dict[int, int] = {}

    def replicas(self, prompt: int, whole: int) -> int:
        """Return the number for a request of `prompt` tokens, `whole` with its output; 0 if all replicas together
        cannot hold it."""
        least = self.least(whole)
        if least > self._most:
            return 0
        if self._rule == "memory":
            return least
        wanted = self._fixed if self._rule == "fixed" else self._fast_enough(-(-prompt // _LENGTH_STEP))
        return max(least, min(wanted, self._most))

    def least(self, whole: int) -> int:
        """Return the fewest replicas that hold so many tokens: the output's KV counts too, as it stays on the group."""
        return -(-whole // self._capacity) if self._capacity else 1

    def _fast_enough(self, steps: int) -> int:
        """Return the fewest replicas that keep the target; all if none do. Assumes that more are never slower."""
        known = self._fitting.get(steps)
        if known is None:
            low, high = 1, self._most
            while low < high:
                middle = (low + high) // 2
                # the fewest nodes that have so many replicas
                nodes = -(-middle // self._per_node)
                fits = self._chooser.choose(steps * _LENGTH_STEP, middle, nodes).prefill_s <= self._target_s
                low, high = (low, middle) if fits else (middle + 1, high)
            known = self._fitting[steps] = low
        return known
