"""Short requests under PecSched: an index of the replicas by the work in their queues, what of a prompt is cached
where, and the place of prefill and decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import ClassVar

from headway.core.request import Request
from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.policy.placement.contract import CachedPrefix, ClusterSnapshot, RequestArrived, final_tokens
from headway.policy.placement.pecsched.long import (
    GroupSizing,
    IndexedNodes,
    NodeSelection,
    SequenceParallelGroup,
    StrategyChoice,
    StrategyChooser,
)
from headway.policy.placement.prefix_reuse import PrefixStart, cheapest_start, copy_pays, copy_seconds, longest_prefix
from headway.policy.placement.registry import PolicyContext

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


class ShortRequest:
    """A short request until it decodes elsewhere or ends."""

    __slots__ = ("replica", "request", "tokens", "weight")

    def __init__(self, request: Request, weight: int) -> None:
        self.request = request
        self.weight = weight  # of its prefill, in the unit of queues
        self.tokens = request.prompt_tokens  # of its prefill, without cached ones once it is placed
        self.replica = -1  # -1: in the global queue


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
        groups, sets, free, tokens, decodes = self.group, self._set_of, self.free, self.tokens, self.decodes
        for replica in group.replicas:
            # `_move(replica, None)` inlined: a group may have hundreds of replicas, all from `free`
            groups[replica] = group
            sets[replica] = None
            free.discard(replica)
            if tokens[replica] or decodes[replica]:
                group.busy += 1

    def release(self, group: SequenceParallelGroup) -> None:
        """Free all replicas of a group."""
        for replica in group.replicas:
            self.group[replica] = None
            self._move(replica, self.free)
        self._nodes.release(group.replicas, [self.weight[replica] for replica in group.replicas])

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
        """Of the event that is handled; set with each one."""

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
        if not copy_pays(copy_s, whole.prefill_s - rest.prefill_s):
            return whole, None
        # Without copies it is spread over the group as the span begins, as any earlier span's KV.
        return rest, CachedPrefix(longest.instance, longest.tokens, copy_s if copies else 0.0)
