"""PecSched's replicas, and the requests on them. Long ones: how many replicas one gets, which ones, and the order in
which they are preempted and resumed. Short ones: an index of the replicas by the work in their queues, what of a prompt
is cached where, and the place of prefill and decode.

States of a long request (`GroupState`):
drain      committed; short prefills on its replicas end first, and no more are sent there
prefill    computes; may be preempted
pausing    asked to pause; short prefills may already be sent to its replicas
paused     keeps its state while short prefills run on its replicas
closing    paused for as long as ageing allows: takes no more short prefills, and resumes when those there have ended
decode     decodes on its replicas; may be preempted only without co-location
ended      has left its replicas
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from headway.core.request import Request, Strategy
from headway.perf.latency.groups import LOCAL, GroupLatency, GroupShape
from headway.policy.placement.contract import CachedPrefix, ClusterSnapshot, RequestArrived, final_tokens, members_for
from headway.policy.placement.kv_places import PrefixStart, cheapest_start, copy_seconds, longest_prefix
from headway.policy.placement.registry import PolicyContext

GroupState = Literal["drain", "prefill", "pausing", "paused", "closing", "decode", "ended"]


@dataclass(slots=True, eq=False)
class SequenceParallelGroup:
    """A long request with the replicas that compute it."""

    request: Request
    replicas: tuple[int, ...]
    order: int
    """Place among the long requests, in the order in which they got their replicas."""
    pause_interval_s: float = 0.0
    """Longest predicted time between two pause points of its prefill."""
    prefill_s: float = 0.0
    """Predicted time of its prefill alone."""
    state: GroupState = "drain"
    decoding: bool = False
    busy: int = 0
    """Replicas with short requests."""
    began_s: float = 0.0
    """When it last began to compute, or to decode."""
    paused_at_s: float = 0.0
    """When it was paused last."""
    computed_s: float = 0.0
    suspended_s: float = 0.0

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
    """Replicas available to long requests, with their queues, by node."""

    def __init__(self, node_of: Sequence[int]) -> None:
        """`node_of`: the node of each replica."""
        rows = {name: row for row, name in enumerate(sorted(set(node_of)))}
        members: list[list[int]] = [[] for _ in rows]
        # Row and column of each replica in the tables below; a node with fewer replicas has columns that stay taken.
        self._place: list[tuple[int, int]] = []
        for replica, name in enumerate(node_of):
            row = rows[name]
            self._place.append((row, len(members[row])))
            members[row].append(replica)
        self._members = members
        self._queues = np.full((len(rows), max(map(len, members), default=1)), _TAKEN)

    def update(self, replica: int, weight: int) -> None:
        """Make a replica available with this queue, or change its queue."""
        self._queues[self._place[replica]] = weight

    def take(self, size: int) -> NodeSelection | None:
        """Select `size` replicas and make them unavailable; None if fewer are available."""
        queues = self._queues
        counts = (queues < _TAKEN).sum(axis=1)
        if counts.sum() < size:
            return None
        # column k: the sum of a node's k + 1 shortest queues; of equal ones the lower replica's first
        order = queues.argsort(axis=1, kind="stable")
        sums = np.take_along_axis(queues, order, axis=1).cumsum(axis=1)
        chosen: list[tuple[int, int]] = []
        while len(chosen) < size:
            want = min(size - len(chosen), int(counts.max()))
            # a node with fewer than `want` has `_TAKEN` in its sum: it is never the minimum here
            row = int(sums[:, want - 1].argmin())
            taken = order[row, :want].tolist()
            chosen += [(row, self._members[row][column]) for column in taken]
            queues[row, taken] = sums[row] = _TAKEN
            counts[row] = 0
        chosen.sort()
        return NodeSelection(tuple(replica for _, replica in chosen), len({row for row, _ in chosen}))


# Sets of replicas that answer which member has the shortest queue.
#
# Queue lengths are whole numbers (tokens, or microseconds), so that adding and subtracting is exact. Ties go to the
# lower replica.


class HeapArgMin:
    """A set of replicas, each with a weight.

    By a heap that drops stale entries when they reach the top: O(log n) a change, amortised O(log n) an answer."""

    __slots__ = ("_count", "_heap", "_key", "_limit")

    def __init__(self, count: int) -> None:
        """`count`: replicas, members or not."""
        self._count = max(1, count)
        self._key = [-1] * count  # valid heap entry of each replica; -1: no member
        self._heap: list[int] = []
        self._limit = 4 * count + 64

    def update(self, replica: int, weight: int) -> None:
        """Add a replica, or change its weight."""
        # one number orders by (weight, replica)
        key = weight * self._count + replica
        self._key[replica] = key
        heap = self._heap
        # the replica's older entries stay in the heap; `_key` tells which one is valid
        heappush(heap, key)
        if len(heap) > self._limit:  # mostly stale entries: rebuild it
            heap[:] = {key for key in self._key if key >= 0}
            heapify(heap)

    def discard(self, replica: int) -> None:
        """Remove a replica; no error if it is no member."""
        self._key[replica] = -1

    def argmin(self) -> int:
        """Return the member with the smallest (weight, replica); -1 if there is none."""
        heap, keys, count = self._heap, self._key, self._count
        while heap:
            replica = heap[0] % count
            if keys[replica] == heap[0]:
                return replica
            heappop(heap)
        return -1


UNITS_A_SECOND = 1e6
"""Queues that count seconds are whole microseconds."""


@dataclass(slots=True)
class ShortRequest:
    """A short request until it decodes elsewhere or ends."""

    request: Request
    weight: int
    """Length of its prefill, in the unit of queues."""
    tokens: int
    """Tokens to prefill; once it is placed, without the cached ones."""
    replica: int = -1
    """-1: in the global queue."""


class QueueWeights:
    """What prompts add to a replica's queue: their tokens, or their predicted prefill times."""

    def __init__(self, latency: GroupLatency, counts_seconds: bool) -> None:
        self._latency, self._counts_seconds = latency, counts_seconds
        self._known: dict[int, int] = {}  # by prompt tokens

    def weight(self, tokens: int) -> int:
        """Return what a prompt of `tokens` adds to a queue, in the unit of queues."""
        if not self._counts_seconds:
            return tokens
        weight = self._known.get(tokens)
        if weight is None:
            seconds = self._latency.prefill_s(0, tokens, GroupShape(1))
            # at least 1: a queue of weight 0 counts as idle
            weight = self._known[tokens] = max(1, round(seconds * UNITS_A_SECOND))
        return weight


class DecodeInstances:
    """Instances of role decode, and the short requests that decode on them."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._load = [0] * len(ids)  # tokens of the requests on each
        self._least_loaded = HeapArgMin(len(ids))
        self._requests: dict[str, tuple[int, int]] = {}  # (place in `ids`, tokens), by request id
        for at in range(len(ids)):
            self._least_loaded.update(at, 0)

    def __contains__(self, name: str) -> bool:
        return name in self._requests

    def place(self, request: Request) -> int:
        """Give a request to the instance with the fewest tokens, and return its id."""
        at = self._least_loaded.argmin()
        # the KV that it will have at most
        tokens = request.prompt_tokens + request.max_output_tokens
        self._add(at, tokens)
        self._requests[request.id] = (at, tokens)
        return self._ids[at]

    def remove(self, name: str) -> bool:
        """Remove a request that has ended. False: it is on none of these instances."""
        where = self._requests.pop(name, None)
        if where is not None:
            self._add(where[0], -where[1])
        return where is not None

    def _add(self, at: int, tokens: int) -> None:
        self._load[at] += tokens
        self._least_loaded.update(at, self._load[at])


# Index of the replicas' queues by the work on them, for the placement of short prefills and of long requests.
#
# A replica is in at most one of three sets: `free` (no long request), `colocated` (a long request decodes there) and
# `paused` (one is paused there, or about to be). Replicas that are drained for a long prefill, or compute one, are in
# none. An answer reads the top of a heap, at 8,192 replicas as at 32 (the cost of PecSched's own scan grows with the
# cluster, its Fig. 15).


class ReplicaIndex:
    """Replicas 0, 1, … with their queues of short prefills."""

    ArgMin: ClassVar[type[HeapArgMin]] = HeapArgMin
    Nodes: ClassVar[type[IndexedNodes]] = IndexedNodes

    def __init__(self, node_of: Sequence[int]) -> None:
        """`node_of`: the node of each replica."""
        count = len(node_of)
        self.weight = [0] * count  # queue of short prefills, in the policy's unit
        self.tokens = [0] * count  # the same in tokens
        self.decodes = [0] * count  # short requests that decode
        # the long request of each replica
        self.group: list[SequenceParallelGroup | None] = [None] * count
        self.free, self.colocated, self.paused = self.ArgMin(count), self.ArgMin(count), self.ArgMin(count)
        self._nodes = self.Nodes(node_of)
        # the set that each replica is in: `free`, `colocated`, `paused` or none
        self._set_of: list[HeapArgMin | None] = [None] * count
        for replica in range(count):
            self._move(replica, self.free)
            self._nodes.update(replica, 0)

    # -- short prefills -------------------------------------------------------------------------------------------

    def add_prefill(self, replica: int, weight: int, tokens: int) -> None:
        """Add a short prefill to a replica's queue."""
        group = self.group[replica]
        # before the counters change: `busy` rises with the replica's first short request only
        if group is None:
            self._nodes.update(replica, self.weight[replica] + weight)
        elif not self.occupied(replica):
            group.busy += 1
        self.weight[replica] += weight
        self.tokens[replica] += tokens
        members = self._set_of[replica]
        if members is not None:
            members.update(replica, self.weight[replica])

    def end_prefill(self, replica: int, weight: int, tokens: int) -> None:
        """Remove a short prefill from a replica's queue."""
        self.weight[replica] -= weight
        self.tokens[replica] -= tokens
        members = self._set_of[replica]
        if members is not None:
            members.update(replica, self.weight[replica])
        group = self.group[replica]
        # after the counters have changed: `busy` falls with the replica's last short request only
        if group is None:
            self._nodes.update(replica, self.weight[replica])
        elif not self.occupied(replica):
            group.busy -= 1

    def add_decodes(self, replica: int, more: int) -> None:
        """Change the number of short requests that decode on a replica. They only delay long requests."""
        # `busy` counts replicas with short requests: it changes with the first and the last one
        group, before = self.group[replica], self.occupied(replica)
        self.decodes[replica] += more
        if group is not None:
            group.busy += self.occupied(replica) - before

    def occupied(self, replica: int) -> bool:
        """Return whether a replica has short requests."""
        return bool(self.tokens[replica] or self.decodes[replica])

    def is_free(self, replica: int) -> bool:
        """Return whether a replica takes short requests and has no long one."""
        return self._set_of[replica] is self.free

    def fits(self, replica: int, tokens: int, most: int) -> bool:
        """Return whether a prompt of `tokens` may join: the queue is empty, or stays within `most` tokens."""
        queued = self.tokens[replica]
        return not queued or queued + tokens <= most

    # -- long requests --------------------------------------------------------------------------------------------

    def take(self, size: int) -> NodeSelection | None:
        """Select replicas for a long request, node first, least total queue; None if fewer are free of long requests.
        The caller calls `occupy` next."""
        return self._nodes.take(size)

    def occupy(self, group: SequenceParallelGroup) -> None:
        """Give a group the replicas selected for it; they take no short requests."""
        for replica in group.replicas:
            self.group[replica] = group
            self._move(replica, None)
            group.busy += self.occupied(replica)

    def release(self, group: SequenceParallelGroup) -> None:
        """Free all replicas of a group."""
        for replica in group.replicas:
            self.group[replica] = None
            self._move(replica, self.free)
            self._nodes.update(replica, self.weight[replica])

    def move_to(self, group: SequenceParallelGroup, members: HeapArgMin | None) -> None:
        """Move a group's replicas to the set `colocated` or `paused`; None: to none, they take no short prefills."""
        for replica in group.replicas:
            self._move(replica, members)

    def _move(self, replica: int, members: HeapArgMin | None) -> None:
        old = self._set_of[replica]
        if old is not None and old is not members:
            old.discard(replica)
        self._set_of[replica] = members
        if members is not None:
            members.update(replica, self.weight[replica])


class CachedPrefixes:
    """What instances had cached of each request when it arrived, and what follows for where it goes."""

    def __init__(self, context: PolicyContext, enabled: bool, counts_seconds: bool) -> None:
        """counts_seconds: the unit of queues (`QueueWeights`)."""
        self._context, self._enabled, self._counts_seconds = context, enabled, counts_seconds
        self._cached: dict[str, tuple[int, ...]] = {}
        self.view: ClusterSnapshot
        """The snapshot that came with the event; set for each event."""

    def note(self, event: RequestArrived) -> None:
        """Remember a new request's hits, if placements count them."""
        if self._enabled and event.cached:
            self._cached[event.request.id] = event.cached

    def forget(self, request: str) -> None:
        """Forget a request that has ended."""
        self._cached.pop(request, None)

    def uncached_tokens(self, request: Request) -> int:
        """Return the tokens behind a request's longest cached prefix."""
        return request.prompt_tokens - max(self._cached.get(request.id, ()), default=0)

    def is_long(self, request: Request, long_tokens: int, sizes: GroupSizing) -> bool:
        """Return whether the uncached tokens are more than `long_tokens`, or no replica alone holds the request."""
        if self.uncached_tokens(request) > long_tokens:
            return True
        return sizes.least(final_tokens(request)) > 1

    # -- short requests ---------------------------------------------------------------------------------------------

    def place(
        self, short: ShortRequest, chosen: int, ids: Sequence[int], replicas: ReplicaIndex, most: int | None
    ) -> tuple[int, CachedPrefix | None]:
        """Return the replica of a short request with the earliest end of its prefill, of `chosen` and those without a
        long request that have some of it cached, and the prefix behind which it begins there. Sets its weight.

        ids: instances of the replicas. most: tokens of a queue that it may join; None: any."""
        cached = self._cached.get(short.request.id)
        if cached is None:
            return chosen, None
        places = [chosen]
        if replicas.is_free(chosen):
            places += [
                at
                for at, i in enumerate(ids)
                if cached[i] and at != chosen and replicas.is_free(at)
                and (most is None or replicas.fits(at, short.request.prompt_tokens - cached[i], most))
            ]  # fmt: skip
        starts = {at: cheapest_start(short.request, cached, ids[at], self.view, self._context) for at in places}
        weights = {at: self._weight(short.request, start) for at, start in starts.items()}
        best = min(places, key=lambda at: (replicas.weight[at] + weights[at], at != chosen, at))
        short.weight, short.tokens = weights[best], max(1, short.request.prompt_tokens - starts[best].tokens)
        return best, starts[best].prefix

    def _weight(self, request: Request, start: PrefixStart) -> int:
        units = start.seconds * UNITS_A_SECOND if self._counts_seconds else request.prompt_tokens - start.tokens
        return max(1, round(units))

    # -- long requests ----------------------------------------------------------------------------------------------

    def choose(
        self, request: Request, group: Sequence[int], nodes: int, chooser: StrategyChooser
    ) -> tuple[StrategyChoice, CachedPrefix | None]:
        """Return the strategy of a long request on a group of instances, and the prefix behind which it begins if a
        copy to the group is faster than computing it again. Where instances copy none, one of the group has to have
        it."""
        whole = chooser.choose(request.prompt_tokens, len(group), nodes)
        copies = self._context.copies_prefixes
        longest = longest_prefix(self._cached.get(request.id, ()), None if copies else group)
        if longest is None:
            return whole, None
        copy_s = copy_seconds(longest.tokens, longest.instance, group, self.view, self._context)
        rest = chooser.choose(request.prompt_tokens, len(group), nodes, longest.tokens)
        if copy_s >= whole.prefill_s - rest.prefill_s:
            return whole, None
        # Without copies it is spread over the group as the span begins, as any earlier span's KV.
        return rest, CachedPrefix(longest.instance, longest.tokens, copy_s if copies else 0.0)
