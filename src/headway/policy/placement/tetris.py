"""Tetris (§5): chunks of a prompt on growing groups, filling the gaps between instances' queues, with load-aware sizes.

Every request is planned when it arrives, on the absolute time line of what is committed, and committed whole; its
decode instance is chosen then too. Latencies come as Eq. (1); any other model of groups is sampled and fitted first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import msgspec
from pydantic import Field, model_validator
from typing_extensions import override

from headway.core.errors import ConfigError
from headway.core.file_sections import Count, Seconds
from headway.core.request import Request, Span, Strategy
from headway.perf.latency import eq1
from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.policy.placement.baselines import prefill_instances
from headway.policy.placement.cdsp import CdspPlanner, ChunkAllocation, ChunkPlan
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    CachedPrefix,
    ClusterSnapshot,
    CommitSpans,
    Event,
    LoadAwareRates,
    PlacementPolicy,
    RateControl,
    RateTable,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    final_tokens,
    load_rates,
    members_for,
)
from headway.policy.placement.kv_places import AffinityOptions, DecodePlacement, copy_seconds, longest_prefix
from headway.policy.placement.registry import PolicyContext


class TetrisOptions(AffinityOptions):
    """Settings of `tetris`. At most one of `rate`, `rates` and `rates_file`; without them the rate is 0.3."""

    sizes: tuple[Count, ...] = ()
    """SP size candidates; empty: powers of two."""
    rate: Annotated[float, Field(ge=0, lt=1)] | None = None
    """A fixed improvement rate."""
    rates: tuple[tuple[float, float], ...] = ()
    """Pairs of (requests a second, improvement rate)."""
    rates_file: str | None = None
    """File of such a table (`headway profile rates`)."""
    window_s: Seconds = 30.0
    """Length of the window in which the load is measured."""
    refresh_s: Seconds = 30.0
    """Time between two measurements of the load."""
    single_chunk: bool = False
    """Algorithm 1 without lines 5-21: a prompt is one chunk."""
    anchored: bool = True
    """False: keep to the plans' own time line and ignore when spans really end (to show what that costs)."""

    @model_validator(mode="after")
    def _one_source_of_rates(self) -> Self:
        if sum((self.rate is not None, bool(self.rates), self.rates_file is not None)) > 1:
            raise ValueError("give one of `rate`, `rates` and `rates_file`")
        return self


class PrefixPlan(NamedTuple):
    """A plan that begins behind a request's cached prefix, if that is sooner."""

    request: Request
    """With the cached tokens that the plan counts on."""
    allocation: ChunkAllocation
    prefix: CachedPrefix | None


class TetrisPlacement(LoadAwareRates, PlacementPolicy):
    """See the module."""

    def __init__(self, context: PolicyContext, options: TetrisOptions) -> None:
        self._context, self._latency, self._options = context, context.latency, options
        self.rates = RateControl(_table(options), options.window_s, options.refresh_s)
        self._decodes = DecodePlacement()
        self._requests: dict[str, Request] = {}
        self._cached: dict[str, tuple[int, ...]] = {}  # tokens that instances had when a request arrived
        self._planners: dict[int, CdspPlanner] = {}  # by the fewest instances of a group
        self._ids: tuple[int, ...] = ()  # instance of each position in the planner's pool
        self._own_free_s: list[float] = []  # by position, when all plans so far end; only if not anchored

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if isinstance(event, RequestArrived):
            self._requests[event.request.id] = event.request
            self.note_cached(event)
            return self._place(event.request, view)
        if isinstance(event, ActionRefused) and event.action == "commit":
            self._decodes.withdraw(event.request)
            return self._place(self._requests[event.request], view)
        if isinstance(event, RequestFinished | RequestDropped):
            self._requests.pop(event.request, None)
            self.forget_cached(event.request)
        return self._decodes.on_event(event)

    @override
    def replace_rates(self, table: RateTable) -> None:
        self.rates.replace(table)

    def _place(self, request: Request, view: ClusterSnapshot) -> Sequence[Action]:
        request, plan, prefix = self.plan_behind_prefix(request, view)
        spans = self.spans(plan, request, view)
        if not self._options.anchored:
            self._advance_own_time(plan, request, view.now_s)
        transfers = self._decodes.place(request, [span.group for span in spans], view)
        return [CommitSpans(request.id, spans, view.version, prefix=prefix), *transfers]

    def note_cached(self, event: RequestArrived) -> None:
        """Remember what instances have cached of a new request, if plans count it."""
        if self._options.affinity and event.cached:
            self._cached[event.request.id] = event.cached

    def forget_cached(self, request: str) -> None:
        """Forget a request that has ended."""
        self._cached.pop(request, None)

    def plan_behind_prefix(self, request: Request, view: ClusterSnapshot) -> PrefixPlan:
        """Return the plan of a request, behind its longest cached prefix where copying that to the plan's first group
        gives an earlier first token than computing all of it.

        Instances that copy none spread a prefix over a group as any earlier chunk: the first group has to include the
        instance with the prefix, which may be alone."""
        plan, copies = self.plan(request, view), self._context.copies_prefixes
        longest = longest_prefix(self._cached.get(request.id, ()), None if copies else self._ids)
        # A copied prefix lies beside its holder's part of the group's KV, which leaves no room for it.
        if longest is None or self._least(request, view) > 1:
            return PrefixPlan(request, plan, None)
        tokens, source = longest.tokens, longest.instance
        behind = msgspec.structs.replace(request, cached_tokens=tokens)
        # KV moves while the group is still busy: a copy only delays what could begin before it ends
        copies_s = [copy_seconds(tokens, source, (i,), view, self._context) for i in self._ids]
        reusing = self.plan(behind, view, copies_s)
        if not copies:
            reusing = self._at_source(behind, reusing, self._ids.index(source), view)
        if reusing.ttft_s >= plan.ttft_s:
            return PrefixPlan(request, plan, None)
        group = [self._ids[i] for i in reusing.chunks[0].group]
        copy_s = copy_seconds(tokens, source, group, view, self._context) if copies else 0.0
        return PrefixPlan(behind, reusing, CachedPrefix(source, tokens, copy_s))

    def _at_source(
        self, request: Request, plan: ChunkAllocation, source: int, view: ClusterSnapshot
    ) -> ChunkAllocation:
        """Return the sooner of a plan, if its first group includes the position `source`, and of that one alone."""
        tokens = request.prompt_tokens - request.cached_tokens
        alone_s = self._latency.prefill_s(request.cached_tokens, tokens, GroupShape(1))
        alone = ChunkAllocation((ChunkPlan(tokens, (source,)),), self._queue_s(view)[source] + alone_s)
        return plan if source in plan.chunks[0].group and plan.ttft_s < alone.ttft_s else alone

    def spans(self, plan: ChunkAllocation, request: Request, view: ClusterSnapshot) -> tuple[Span, ...]:
        """Return the spans of a plan: its chunks on instances instead of positions."""
        spans, start = [], request.cached_tokens
        for tokens, group in plan.chunks:
            ids = view.ordered(self._ids[i] for i in group)
            strategy = Strategy(attn="striped" if len(ids) > 1 else "local")
            spans.append(Span(request=request, start=start, end=start + tokens, group=ids, strategy=strategy))
            start += tokens
        return tuple(spans)

    def plan(self, request: Request, view: ClusterSnapshot, not_before_s: Sequence[float] = ()) -> ChunkAllocation:
        """Return the allocation of a request, on positions among the prefill instances. not_before_s: by position,
        seconds from now before which it cannot begin there."""
        least = self._least(request, view)
        if least not in self._planners:
            self._planners[least] = self._make_planner(view, least)
        queue_s = self._queue_s(view)
        if not_before_s:
            queue_s = [max(pair) for pair in zip(queue_s, not_before_s, strict=True)]
        tokens, rate = request.prompt_tokens - request.cached_tokens, self.rates.rate(view)
        # One chunk for what no instance holds alone: a chunk's KV lies beside the layout that the next chunk gives it.
        single = self._options.single_chunk or least > 1
        return self._planners[least].plan(tokens, queue_s, rate, request.cached_tokens, single=single)

    def _least(self, request: Request, view: ClusterSnapshot) -> int:
        """Return the fewest instances that hold a request."""
        if not self._ids:
            # by (node, id): positions of one node are consecutive
            self._ids = view.ordered(prefill_instances(view, "tetris"))
            self._own_free_s = [0.0] * len(self._ids)
        return members_for(final_tokens(request), min(view.instances[i].capacity for i in self._ids))

    def _queue_s(self, view: ClusterSnapshot) -> list[float]:
        """Return the seconds until each position is free."""
        if self._options.anchored:
            # closed loop: `free_at_s` is corrected whenever a span takes longer or shorter than predicted
            return [max(0.0, view.instances[i].free_at_s - view.now_s) for i in self._ids]
        return [max(0.0, free - view.now_s) for free in self._own_free_s]

    def _advance_own_time(self, plan: ChunkAllocation, request: Request, now: float) -> None:
        """Open loop: extend the own time line by a plan as if it came true."""
        latency, past, at = _eq1(self._latency, self._sizes()), request.cached_tokens, now
        for tokens, group in plan.chunks:
            # Eq. (2): a chunk starts after the previous one, when its whole group is free
            at = max(at, *(self._own_free_s[i] for i in group))
            at += latency.sizes[len(group)].prefill_s(past, tokens)
            past += tokens
            for i in group:
                self._own_free_s[i] = at

    def _make_planner(self, view: ClusterSnapshot, least: int) -> CdspPlanner:
        """Make the planner of groups of at least so many instances."""
        nodes = [view.instances[i].node for i in self._ids]
        latency = _eq1(self._latency, self._sizes())
        return CdspPlanner(latency, [s for s in self._sizes() if s in latency.sizes and s >= least], nodes)

    def _sizes(self) -> tuple[int, ...]:
        known = self._latency.sizes if isinstance(self._latency, eq1.Eq1Latency) else None
        sizes = self._options.sizes or tuple(1 << k for k in range(8))
        return tuple(s for s in sizes if s <= len(self._ids) and (known is None or self._options.sizes or s in known))


def _table(options: TetrisOptions) -> RateTable:
    if options.rates_file is not None:
        return load_rates(Path(options.rates_file))
    if options.rates:
        return RateTable(points=options.rates)
    return RateTable(points=((0.0, 0.3 if options.rate is None else options.rate),))


def _eq1(latency: GroupLatency, sizes: Sequence[int]) -> eq1.Eq1Latency:
    if isinstance(latency, eq1.Eq1Latency):
        return latency
    if not sizes:
        raise ConfigError("tetris has no SP size that fits the prefill instances")
    return eq1.fit_to(latency, sizes)
