"""Baseline placement policies: FIFO, join the shortest queue, groups of one fixed size, context parallelism over all
instances, and the choice of a group that they share.

A request goes whole to one replica when it arrives, and is never moved; the replica's scheduler decides its order and
its chunks (LARS and adaptive chunks unless the scenario says otherwise).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Self

from pydantic import model_validator

from headway.core.errors import ConfigError
from headway.core.file_sections import Count, CountOrZero
from headway.core.request import AttentionStrategy, Request, Span, Strategy
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    CachedPrefix,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    Event,
    PlacementPolicy,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    SpanDone,
    final_tokens,
    members_for,
)
from headway.policy.placement.kv_places import AffinityOptions, DecodePlacement, PrefixStart, cheapest_start
from headway.policy.placement.registry import PolicyContext, PolicyOptions


class JsqOptions(AffinityOptions):
    """Settings of `jsq`."""

    queue: Literal["seconds", "tokens", "requests"] = "seconds"
    """A queue's length: the predicted seconds of its prefills; their tokens, which leave out that attention is
    quadratic; or the number of requests with decodes, as a load balancer without predictions counts."""

    @model_validator(mode="after")
    def _measurable_affinity(self) -> Self:
        if self.affinity and self.queue == "requests":
            raise ValueError("`affinity` compares work: give `queue: seconds` or `queue: tokens`")
        return self


class JoinShortestQueue(PlacementPolicy):
    """See the module. Ties go to the replica with fewer requests, then to the lower id."""

    def __init__(self, context: PolicyContext, options: JsqOptions) -> None:
        self._queue, self._affinity, self._context = options.queue, options.affinity, context

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if not isinstance(event, RequestArrived):
            return []
        replicas = view.with_role("mixed")
        if not replicas:
            raise ConfigError("jsq needs instances of role mixed: replicas that prefill and decode")
        starts: dict[int, PrefixStart] = {}
        if self._affinity and event.cached:
            starts = {i: self._start(event, i, view) for i in replicas}
        none = PrefixStart(None, 0.0)
        shortest = min(replicas, key=lambda i: (self._queue_length(view, i, starts.get(i, none).seconds), i))
        return [EnqueueRequest(event.request.id, (shortest,), prefix=starts.get(shortest, none).prefix)]

    def _start(self, event: RequestArrived, replica: int, view: ClusterSnapshot) -> PrefixStart:
        """Return how the request would begin on a replica, with its work there in the queue's unit."""
        if self._queue == "seconds":
            return cheapest_start(event.request, event.cached, replica, view, self._context)
        own = event.cached[replica]
        return PrefixStart(CachedPrefix(replica, own) if own else None, max(1, event.request.prompt_tokens - own))

    def _queue_length(self, view: ClusterSnapshot, replica: int, added: float) -> tuple[float, int]:
        """Return (length in the chosen unit with `added` work, what decides between equal lengths)."""
        instance = view.instances[replica]
        if self._queue == "requests":
            return instance.running, instance.queued
        # idle replicas all count as 0, whenever they became free
        wait_s = max(0.0, instance.free_at_s - view.now_s)
        return added + (wait_s if self._queue == "seconds" else instance.queued), instance.running


def prefill_instances(view: ClusterSnapshot, policy: str) -> tuple[int, ...]:
    """Return ids of the instances that prefill. Raises ConfigError, with the policy's name, where there are none."""
    instances = view.with_role("mixed", "prefill")
    if not instances:
        raise ConfigError(f"{policy} needs at least one instance of role mixed or prefill")
    return instances


def by_free_time(view: ClusterSnapshot, candidates: Iterable[int]) -> dict[int, list[int]]:
    """Return the instances of each node, in order of when they are free, ties by id."""
    nodes: dict[int, list[int]] = {}
    for i in sorted(candidates, key=lambda i: (max(view.instances[i].free_at_s, view.now_s), i)):
        nodes.setdefault(view.instances[i].node, []).append(i)
    return dict(sorted(nodes.items()))


def first_free_group(view: ClusterSnapshot, candidates: Iterable[int], size: int) -> tuple[int, ...]:
    """Return `size` instances on as few nodes as possible, in order of (node, id).

    If single nodes have `size` candidates, take the node where all of them are free first. Else take whole nodes in
    the order in which they become free, and the remainder inside one more."""
    return first_free_of(view, by_free_time(view, candidates), size)


def first_free_of(view: ClusterSnapshot, by_node: Mapping[int, list[int]], size: int) -> tuple[int, ...]:
    """`first_free_group` from the result of `by_free_time`, for callers that try several sizes."""
    nodes = dict(by_node)
    chosen: list[int] = []
    while len(chosen) < size:
        missing = size - len(chosen)
        free = {node: ids for node, ids in nodes.items() if ids}
        if not free:
            raise ValueError(f"a group of {size} of {len(chosen)} instances")
        sufficient = [node for node, ids in free.items() if len(ids) >= missing]
        # no node has enough: take a whole one, of those with most
        options = sufficient or [node for node, ids in free.items() if len(ids) == max(map(len, free.values()))]
        best = min(options, key=lambda node: (_all_free_s(view, free[node][:missing]), node))
        chosen += free[best][:missing]
        nodes[best] = []
    return view.ordered(chosen)


def _all_free_s(view: ClusterSnapshot, group: list[int]) -> float:
    return max(view.now_s, *(view.instances[i].free_at_s for i in group))


def least_loaded(view: ClusterSnapshot, candidates: Iterable[int]) -> int:
    """Return the instance whose queue is free first; ties go to fewer requests, then to the lower id."""

    def load(i: int) -> tuple[float, int, int]:
        instance = view.instances[i]
        return max(instance.free_at_s, view.now_s), instance.running, i

    return min(candidates, key=load)


def is_long(request: Request, long_tokens: int, candidates: Iterable[int], view: ClusterSnapshot) -> bool:
    """Return whether a prompt has more than `long_tokens`, or one of the candidates does not hold the request alone."""
    if request.prompt_tokens > long_tokens:
        return True
    return members_for(final_tokens(request), min(view.instances[i].capacity for i in candidates)) > 1


def commit_as_ring(
    request: Request, group: tuple[int, ...], view: ClusterSnapshot, concurrent: bool = False
) -> CommitSpans:
    """Return the commitment of the whole prompt to a group, as one zigzag ring."""
    span = Span(
        request=request,
        start=request.cached_tokens,
        end=request.prompt_tokens,
        group=group,
        strategy=Strategy(attn="ring" if len(group) > 1 else "local"),
    )
    return CommitSpans(request.id, (span,), view.version, concurrent)


# FIFO, as vLLM behind one queue: requests are placed strictly in order of arrival, and none overtakes on an instance.
#
# A short request joins the instance whose queue is free first. A long one takes `long_sp` instances as one ring, node
# first, when all of them are free: later arrivals on these instances wait, which is the head-of-line blocking that
# PecSched §3.2 measures. It decodes on the same group.


class FifoOptions(PolicyOptions):
    """Settings of `fifo`."""

    long_tokens: CountOrZero = 32_768
    """Prompts above this are long."""
    long_sp: Count = 4
    """Instances of a long prompt."""


class FifoPlacement(PlacementPolicy):
    """See the module."""

    def __init__(self, context: PolicyContext, options: FifoOptions) -> None:
        self._options = options
        self._groups: dict[str, tuple[int, ...]] = {}  # of long requests, until they decode

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if isinstance(event, RequestArrived):
            return self._place(event.request, view)
        if isinstance(event, SpanDone) and event.last:
            return [EnqueueRequest(event.request, self._groups.pop(event.request), "decode")]
        return []

    def _place(self, request: Request, view: ClusterSnapshot) -> Sequence[Action]:
        short, long = self._candidates(view)
        if not is_long(request, self._options.long_tokens, (*short, *long), view):
            return [EnqueueRequest(request.id, (least_loaded(view, short),))]
        # committed at once, not when the group is free: arrivals after it wait behind it
        group = first_free_group(view, long, min(self._options.long_sp, len(long)))
        self._groups[request.id] = group
        return [commit_as_ring(request, group, view)]

    def _candidates(self, view: ClusterSnapshot) -> tuple[Sequence[int], Sequence[int]]:
        """Return the instances for short requests, and those for long ones: all for both."""
        found = prefill_instances(view, "fifo")
        return found, found


# Fixed-SP scheduling (Tetris §7.1): prefill instances in independent groups of one size, kept inside nodes.
#
# A request goes, whole, to the group with the lowest queuing delay, in order of arrival.


class FixedSpOptions(PolicyOptions):
    """Settings of `fixed-sp`."""

    sp: CountOrZero = 8
    """Instances of a group; 0: all of them."""


class FixedSp(PlacementPolicy):
    """See the module."""

    def __init__(
        self,
        context: PolicyContext,
        options: FixedSpOptions,
        attn: AttentionStrategy = "striped",
        name: str = "fixed-sp",
    ) -> None:
        """attn: of groups of several instances. name: of the policy, in errors."""
        self._sp, self._attn, self._name = options.sp, attn, name
        self._decodes = DecodePlacement()
        self._groups: tuple[tuple[int, ...], ...] = ()
        self._requests: dict[str, Request] = {}

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if isinstance(event, RequestArrived):
            self._requests[event.request.id] = event.request
            return self._place(event.request, view)
        if isinstance(event, ActionRefused) and event.action == "commit":
            self._decodes.withdraw(event.request)
            return self._place(self._requests[event.request], view)
        if isinstance(event, RequestFinished | RequestDropped):
            self._requests.pop(event.request, None)
        return self._decodes.on_event(event)

    def _place(self, request: Request, view: ClusterSnapshot) -> Sequence[Action]:
        group = self._group(request, view)
        attn = self._attn if len(group) > 1 else "local"
        span = Span(
            request=request,
            start=request.cached_tokens,
            end=request.prompt_tokens,
            group=group,
            strategy=Strategy(attn=attn),
        )
        return [CommitSpans(request.id, (span,), view.version), *self._decodes.place(request, [group], view)]

    def _group(self, request: Request, view: ClusterSnapshot) -> tuple[int, ...]:
        """Return the group that computes a prompt."""
        groups = self._groups or self._make_groups(view)
        # a group begins when its last instance is free; ties go to the first group
        free_s = [max(view.now_s, *(view.instances[i].free_at_s for i in group)) for group in groups]
        return groups[min(range(len(groups)), key=free_s.__getitem__)]

    def _make_groups(self, view: ClusterSnapshot) -> tuple[tuple[int, ...], ...]:
        """Cut the instances into consecutive groups, node by node; a remainder stays unused unless it is everything."""
        instances = view.ordered(prefill_instances(view, self._name))
        sp = min(self._sp or len(instances), len(instances))
        self._groups = tuple(instances[i : i + sp] for i in range(0, len(instances) - sp + 1, sp))
        return self._groups


# Unchunked context parallelism: every prompt over all prefill instances as one ring, one after another.
#
# Prompts are neither chunked nor preempted: a long one holds the whole pool (the baseline of Medha Fig. 5b and
# Mnemosyne Fig. 14, at cluster level).


class ContextParallelOptions(PolicyOptions):
    """Settings of `context-parallel`."""

    partition: Literal["striped", "contiguous"] = "striped"
    """`striped` interleaves tokens, so that all instances compute the same; `contiguous` is the plain ring, whose last
    instance has nearly twice the mean of causal attention."""


def context_parallel(context: PolicyContext, options: ContextParallelOptions) -> FixedSp:
    """Return fixed-SP scheduling with one group of all prefill instances."""
    return FixedSp(context, FixedSpOptions(mode=options.mode, sp=0), options.partition, "context-parallel")
