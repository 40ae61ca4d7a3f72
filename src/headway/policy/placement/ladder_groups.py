"""Where a prompt runs under the ladder, and when: one cost in seconds for each instance and each size of group.

The cost of a choice is

    wait + t + price * (k * t + idle) + 3 * lateness + delay of others

with t the predicted prefill on k instances, `idle` the instance-seconds for which members of the group would stand idle
until the last one is free, and `lateness` the seconds after the prompt's due time. The price is the number of requests
that an instance-second keeps waiting: those in the queue, and those that will come while the cluster is as busy as it
has been, a share of the instances each. So an idle cluster gives a prompt all that it can use, and a busy one the most
efficient group. Choices that begin later compete with those that can begin now: a prompt waits for a larger group, for
an instance with its prefix, only where that costs less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.core.request import Request, Strategy
from headway.perf.latency.eq1 import Eq1Latency
from headway.perf.latency.groups import GroupShape
from headway.policy.ladder import STEP
from headway.policy.placement.contract import CachedPrefix, ClusterSnapshot
from headway.policy.placement.kv_places import copy_seconds
from headway.policy.placement.registry import PolicyContext

LATE_WEIGHT = 3.0
"""A second after the due time counts so many seconds of waiting."""
_RATE_WINDOW_S = 120.0
"""Time constant of the mean arriving work."""
_LEAST_SHARE = 0.2
"""Least weight of the time that has been seen: at the start a few arrivals are no rate."""
_MOST_BUSY = 0.95
"""Largest share of the instances that arriving work is taken to need: beyond it the queue itself tells."""


STRIPED, ALONE = Strategy(attn="striped"), Strategy()


class Choice(NamedTuple):
    """A place for a prompt: one instance's scheduler, or a group of its own. The least is the best."""

    cost: float
    start_s: float
    """Absolute time at which it can begin."""
    end_s: float
    """Absolute time of the first token."""
    group: tuple[int, ...]
    prefix: CachedPrefix | None
    scheduled: bool
    """Whether the instance's scheduler computes it."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A request that waits for its prefill, or whose group is paused."""

    request: Request
    cached: tuple[int, ...]
    prefix: CachedPrefix | None
    times: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """Seconds by (cached tokens, size, nodes)."""
    work_s: float = 0.0
    """Least instance-seconds on any group."""
    fastest_s: float = 0.0
    """Least seconds."""
    target_s: float = 0.0
    """Seconds after arrival at which its first token is due, at step 0."""
    steps: int = 0
    """How many steps of the ladder it has climbed."""

    @property
    def due_s(self) -> float:
        """Absolute time at which the first token is due, as far as the prompt has climbed."""
        return self.request.arrival_s + self.target_s * STEP**self.steps


class ArrivingWork:
    """Instance-seconds that arrive a second, over the last minutes."""

    def __init__(self) -> None:
        self._rate = self._share = 0.0  # weighted by age, and the weight of the time that has been seen
        self._last_s = 0.0

    def add(self, work_s: float, now: float) -> None:
        """Count the work of a request that arrives."""
        kept = math.exp((self._last_s - now) / _RATE_WINDOW_S)
        self._rate = self._rate * kept + work_s / _RATE_WINDOW_S
        self._share = self._share * kept + 1.0 - kept
        self._last_s = now

    def waiting_share(self, instances: int) -> float:
        """Return rho / (1 - rho), rho the share of the instances that arriving work needs: of a queue with one server,
        the mean number of requests in it."""
        busy = min(_MOST_BUSY, self._rate / max(_LEAST_SHARE, self._share) / instances)
        return busy / (1.0 - busy)


class FreeInstances:
    """When each instance that may join a group is free, by node."""

    def __init__(self, view: ClusterSnapshot, free_s: Mapping[int, float]) -> None:
        """free_s: absolute times, by instance."""
        now, nodes = view.now_s, dict[int, list[tuple[float, int]]]()
        for i, at_s in free_s.items():
            nodes.setdefault(view.instances[i].node, []).append((max(now, at_s), i))
        self.free_s = free_s
        self._nodes = [sorted(members) for _, members in sorted(nodes.items())]

    def __len__(self) -> int:
        return len(self.free_s)

    def first(self, size: int) -> tuple[float, tuple[int, ...], int]:
        """Return the time from which so many are free, these, and their number of nodes: in one node where that has
        enough, and there in the one that is left with the fewest others; else in as few nodes as possible."""
        best: tuple[float, int, list[tuple[float, int]]] | None = None
        for members in self._nodes:
            if len(members) >= size:
                at_s = members[size - 1][0]
                others = sum(free_s <= at_s for free_s, _ in members) - size
                if best is None or (at_s, others) < best[:2]:
                    best = at_s, others, members[:size]
        if best is not None:
            return best[0], tuple(i for _, i in best[2]), 1
        chosen: list[tuple[float, int]] = []
        nodes = 0
        for members in sorted(self._nodes, key=lambda each: (-len(each), each)):
            chosen += members[: size - len(chosen)]
            nodes += 1
            if len(chosen) == size:
                break
        return max(at_s for at_s, _ in chosen), tuple(i for _, i in chosen), nodes


class GroupSizing:
    """Costs of groups of every size. One for each policy."""

    def __init__(self, context: PolicyContext) -> None:
        self._context, self._latency = context, context.latency
        self._largest = max(context.latency.sizes) if isinstance(context.latency, Eq1Latency) else 1 << 30

    def sizes(self, instances: int) -> tuple[int, ...]:
        """Return the sizes of groups among so many instances: powers of two."""
        most = min(instances, self._largest)
        return tuple(1 << k for k in range(8) if 1 << k <= most)

    def seconds(self, prompt: Prompt, past: int, size: int, nodes: int) -> float:
        """Return the predicted prefill of a prompt behind `past` cached tokens."""
        key = past, size, nodes
        found = prompt.times.get(key)
        if found is None:
            tokens = max(1, prompt.request.prompt_tokens - past)
            shape = GroupShape(size, nodes, STRIPED if size > 1 else ALONE)
            found = prompt.times[key] = self._latency.prefill_s(past, tokens, shape)
        return found

    def measure(self, prompt: Prompt, instances: int, per_node: int) -> None:
        """Set the least work and the least time of a prompt in a cluster of so many instances."""
        past = max(prompt.request.cached_tokens, 0 if prompt.prefix is None else prompt.prefix.tokens)
        times = [(k, self.seconds(prompt, past, k, -(-k // per_node))) for k in self.sizes(instances)]
        prompt.work_s = min(k * seconds for k, seconds in times)
        prompt.fastest_s = min(seconds for _, seconds in times)

    def choices(
        self, prompt: Prompt, free: FreeInstances, view: ClusterSnapshot, price: float, least: int
    ) -> Iterator[Choice]:
        """Yield the cost of a group of each size, `least` at least, of the instances that are free first."""
        now, cached = view.now_s, prompt.request.cached_tokens
        for size in self.sizes(len(free)) if len(free) else ():
            if size < least:
                continue
            start_s, group, nodes = free.first(size)
            behind, copy_s = prompt.prefix, 0.0
            if behind is not None:
                if self._context.copies_prefixes:
                    copy_s = copy_seconds(behind.tokens, behind.instance, group, view, self._context)
                elif behind.instance not in group:
                    behind = None
            seconds = self.seconds(prompt, cached, size, nodes)
            if behind is not None:
                # the copy moves while the group is still busy
                late_s = max(0.0, now + copy_s - start_s)
                behind_s = late_s + self.seconds(prompt, behind.tokens, size, nodes)
                if behind_s < seconds:
                    seconds, behind = behind_s, CachedPrefix(behind.instance, behind.tokens, copy_s)
                else:
                    behind = None
            idle_s = sum(start_s - max(now, free.free_s[i]) for i in group)
            end_s = start_s + seconds
            cost = end_s - now + price * (size * seconds + idle_s) + LATE_WEIGHT * max(0.0, end_s - prompt.due_s)
            yield Choice(cost, start_s, end_s, group, behind, False)
