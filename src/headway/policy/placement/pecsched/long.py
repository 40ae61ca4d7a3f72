"""Long requests under PecSched: how many replicas one gets, which ones, and the order in which they are preempted and
resumed.

States (`GroupState`):
drain      committed; short prefills on its replicas end first, and no more are sent there
prefill    computes; may be preempted
pausing    asked to pause; short prefills may already be sent to its replicas
paused     keeps its state while short prefills run on its replicas
closing    paused for as long as ageing allows: takes no more short prefills, and resumes when those there have ended
decode     decodes on its replicas; may be preempted only without co-location
ended      has left its replicas
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from headway.core.request import Request, Strategy
from headway.perf.latency.groups import LOCAL, GroupShape
from headway.policy.placement.contract import members_for
from headway.policy.placement.registry import PolicyContext

GroupState = Literal["drain", "prefill", "pausing", "paused", "closing", "decode", "ended"]


class SequenceParallelGroup:
    """A long request with the replicas that compute it."""

    __slots__ = ("began_s", "busy", "computed_s", "decoding", "order", "pause_interval_s", "paused_at_s", "prefill_s",
                 "replicas", "request", "state", "suspended_s")  # fmt: skip

    def __init__(
        self,
        request: Request,
        replicas: tuple[int, ...],
        order: int,
        pause_interval_s: float = 0.0,
        prefill_s: float = 0.0,
    ) -> None:
        self.request, self.replicas = request, replicas
        self.order = order  # of commitment
        self.pause_interval_s = pause_interval_s  # longest predicted time between two pause points of its prefill
        self.prefill_s = prefill_s  # predicted time of its prefill alone
        self.state: GroupState = "drain"
        self.decoding = False
        self.busy = 0  # replicas with short requests
        self.began_s = 0.0  # when it last began to compute, or to decode
        self.paused_at_s = 0.0  # when it was paused last
        self.computed_s = self.suspended_s = 0.0  # so far

    @property
    def computes(self) -> bool:
        """Whether it computes now and has not been asked to pause."""
        return self.state == ("decode" if self.decoding else "prefill")

    def leaves_room(self, tokens: int, capacity: int) -> bool:
        """Return whether a short prompt's KV fits beside this prompt's on a replica that holds `capacity` tokens (0:
        any number). Else, with this one paused, the short one would wait for its KV, and this one for the short one."""
        share = -(-self.request.prompt_tokens // len(self.replicas))
        # a twentieth for blocks that are not full
        return not capacity or share + tokens <= 0.95 * capacity

    def spare_s(self, at_s: float) -> float:
        """Return how long its prefill may stand still from `at_s` on for the first token to meet the request's target;
        infinite without a target."""
        due_s = self.request.slo.ttft_s
        if due_s is None or self.decoding:
            return float("inf")
        return self.request.arrival_s + due_s - at_s - max(0.0, self.prefill_s - self.computed_s)


class AgeingPolicy:
    """Bound on the suspension of long requests.

    A group may be preempted while it has been suspended for at most `ageing` times as long as it has computed; it then
    waits for at most `ageing` × `slice_s` more. So its whole suspension is little more than `ageing` times its own
    length, and short requests wait for little more than a slice. A target for its first token bounds both further."""

    def __init__(self, ageing: float | None, slice_s: float) -> None:
        """ageing: None: no bound (the paper)."""
        self._ageing, self._slice_s = ageing, slice_s

    def preemptible_at_s(self, group: SequenceParallelGroup) -> float:
        """Return when a computing group may be preempted again."""
        if self._ageing is None:
            return group.began_s
        # no time to lose: how much there is does not change while it computes
        if group.spare_s(group.began_s) <= 0.0:
            return float("inf")
        if not group.suspended_s:
            return group.began_s
        # ageing 0: any suspension is more than allowed, so that it is the last one
        if not self._ageing:
            return float("inf")
        # the time t at which suspended = ageing * (computed + t - began)
        return max(group.began_s, group.began_s + group.suspended_s / self._ageing - group.computed_s)

    def resume_by_s(self, group: SequenceParallelGroup) -> float:
        """Return until when a paused group lets short requests in."""
        if self._ageing is None:
            return float("inf")
        # the time t at which suspended + t - paused_at = ageing * (computed + slice)
        allowed_s = self._ageing * (group.computed_s + self._slice_s) - group.suspended_s
        return group.paused_at_s + min(allowed_s, max(0.0, group.spare_s(group.paused_at_s)))


class PreemptionCandidates:
    """Computing groups in the order of preemption: the youngest first, so that the oldest finish. A group that begins
    now cannot be preempted yet."""

    def __init__(self, ageing: AgeingPolicy) -> None:
        self._ageing_policy = ageing
        # heaps; an entry is stale once its group no longer computes since the entry's `began_s`
        self._later: list[tuple[float, int, float, SequenceParallelGroup]] = []  # by when preemption is allowed
        self._ready: list[tuple[int, float, SequenceParallelGroup]] = []  # by youth

    def add(self, group: SequenceParallelGroup) -> None:
        """Add a group that computes from `began_s` on."""
        heappush(self._later, (self._ageing_policy.preemptible_at_s(group), group.order, group.began_s, group))

    def peek(self, now: float) -> SequenceParallelGroup | None:
        """Return the youngest group that may be preempted; it stays a candidate."""
        later, ready = self._later, self._ready
        while later and later[0][0] < now:
            _, order, began_s, group = heappop(later)
            # negated: the heap's top is the group committed last
            heappush(ready, (-order, -began_s, group))
        while ready:
            _, began_s, group = ready[0]
            # else stale: it was paused, or has begun again under a newer entry
            if group.computes and group.began_s == -began_s:
                return group
            heappop(ready)
        return None

    def pop(self, now: float) -> SequenceParallelGroup | None:
        """Remove and return the youngest group that may be preempted."""
        group = self.peek(now)
        if group is not None:
            heappop(self._ready)
        return group

    def next_s(self) -> float | None:
        """Return when the next group may be preempted; None if none will."""
        later = self._later
        while later:
            at_s, _, began_s, group = later[0]
            if group.computes and group.began_s == began_s:
                # heap order: if the first time is infinite, all are
                return at_s if at_s < float("inf") else None
            heappop(later)
        return None


class AgeingQueue:
    """Paused groups in order of the time at which ageing resumes them."""

    def __init__(self, ageing: AgeingPolicy) -> None:
        self._ageing_policy = ageing
        self._heap: list[tuple[float, int, float, SequenceParallelGroup]] = []

    def add(self, group: SequenceParallelGroup) -> None:
        """Add a group that was paused at `paused_at_s`."""
        due_s = self._ageing_policy.resume_by_s(group)
        if due_s < float("inf"):
            heappush(self._heap, (due_s, group.order, group.paused_at_s, group))

    def next_s(self) -> float | None:
        """Return the earliest time; None if there is none."""
        heap = self._heap
        while heap:
            due_s, _, paused_at_s, group = heap[0]
            if group.state == "paused" and group.paused_at_s == paused_at_s:
                return due_s
            heappop(heap)
        return None

    def due(self, now: float) -> list[SequenceParallelGroup]:
        """Remove and return the groups whose time has come; the caller closes them."""
        found = []
        while (due_s := self.next_s()) is not None and due_s <= now:
            found.append(heappop(self._heap)[3])
        return found


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
        return members_for(whole, self._capacity)

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


# Selection of replicas for a long request: inside one node where possible, else on as few nodes as possible, and of the
# combinations the one with the smallest total queue (PecSched §5, §6.2).
#
# As long as replicas are missing: `want` is the number missing, at most the largest
# number available in one node; of the nodes with `want` available replicas, the one whose `want` shortest queues have
# the smallest sum gives them. Ties go to the node with the lower number, and inside it to the lower replica.

_TAKEN = 1 << 50
"""Queue of a replica that is not available: above any queue, and small enough to be summed over a node."""


class NodeSelection(NamedTuple):
    """Replicas selected for a long request."""

    replicas: tuple[int, ...]
    """In order of (node, replica)."""
    nodes: int
    """Number of nodes that they are on."""


class IndexedNodes:
    """Replicas available to long requests, with their queues, by node.

    Selection is by a table of sums: row = node, column k = sum of the node's k + 1 shortest queues. A row is computed
    again with every change of a queue in its node, so that a selection reads one column for each node that it takes."""

    def __init__(self, node_of: Sequence[int]) -> None:
        """`node_of`: the node of each replica."""
        names = sorted(set(node_of))
        at = {name: row for row, name in enumerate(names)}
        self._row = [at[name] for name in node_of]
        self._members: list[list[int]] = [[] for _ in names]
        for replica, row in enumerate(self._row):
            self._members[row].append(replica)
        width = self._width = max(map(len, self._members), default=1)
        slot = {replica: i for members in self._members for i, replica in enumerate(members)}
        # index of each replica in the flat tables below; nodes with fewer replicas have unused slots, always taken
        self._place = [row * width + slot[replica] for replica, row in enumerate(self._row)]
        self._all_taken = [_TAKEN] * width
        self._no_sums = array("q", accumulate(self._all_taken))
        self._weights = self._all_taken * len(names)
        self._sums = self._no_sums * len(names)
        table = np.frombuffer(self._sums, dtype=np.int64).reshape(-1, width)
        # numpy views of the array's memory: rows are overwritten in place, the array is never resized
        self._columns = [table[:, column] for column in range(width)]
        # available replicas of each node; number of nodes with each count; available replicas in all
        self._counts = [0] * len(names)
        self._with_count = [len(names)] + [0] * width
        self._total = 0

    def update(self, replica: int, weight: int) -> None:
        """Make a replica available with this queue, or change its queue."""
        place, row, width, weights = self._place[replica], self._row[replica], self._width, self._weights
        if weights[place] == _TAKEN:
            self._change_count(row, 1)
        weights[place] = weight
        low = row * width
        self._sums[low : low + width] = array("q", accumulate(sorted(weights[low : low + width])))

    def release(self, replicas: Sequence[int], weights: Sequence[int]) -> None:
        """Make replicas available again, with these queues; none of them was."""
        back: dict[int, int] = {}
        for replica, weight in zip(replicas, weights, strict=True):
            self._weights[self._place[replica]] = weight
            row = self._row[replica]
            back[row] = back.get(row, 0) + 1
        for row, count in back.items():
            self._change_count(row, count)
            self._recompute_row(row)

    def take(self, size: int) -> NodeSelection | None:
        """Select `size` replicas and make them unavailable; None if fewer are available."""
        if self._total < size:
            return None
        chosen: list[tuple[int, list[int]]] = []
        most, missing = self._width, size
        while missing:
            # the largest count only falls while replicas are taken
            while not self._with_count[most]:
                most -= 1
            want = min(missing, most)
            # a node with fewer than `want` has `_TAKEN` in its sum: it is never the minimum here
            row = int(self._columns[want - 1].argmin())
            chosen.append((row, self._take_from(row, want)))
            missing -= want
        chosen.sort()
        return NodeSelection(tuple([replica for _, replicas in chosen for replica in replicas]), len(chosen))

    def _take_from(self, row: int, want: int) -> list[int]:
        """Take the `want` shortest queues of a node; return them in order of replica."""
        low, high, members = row * self._width, (row + 1) * self._width, self._members[row]
        weights = self._weights[low:high]
        self._change_count(row, -want)
        # the whole node was taken: its row needs no sorting
        if not self._counts[row]:
            self._weights[low:high] = self._all_taken
            self._sums[low:high] = self._no_sums
            if want == len(members):
                return members
            return [replica for replica, weight in zip(members, weights, strict=False) if weight != _TAKEN]
        taken = sorted([replica for _, replica in sorted(zip(weights, members, strict=False))[:want]])
        for replica in taken:
            self._weights[self._place[replica]] = _TAKEN
        self._recompute_row(row)
        return taken

    def _change_count(self, row: int, more: int) -> None:
        count = self._counts[row]
        self._with_count[count] -= 1
        self._with_count[count + more] += 1
        self._counts[row] = count + more
        self._total += more

    def _recompute_row(self, row: int) -> None:
        low, high = row * self._width, (row + 1) * self._width
        self._sums[low:high] = array("q", accumulate(sorted(self._weights[low:high])))
