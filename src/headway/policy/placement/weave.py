"""Weave: Tetris between instances, Medha inside them. No paper has the two together.

Tetris's planner (CDSP) decides where a prompt goes: which chunks, on which groups. A prompt that it gives to one
instance, whole, is handed to that instance's scheduler if it is short: that orders such prompts by relative slack
(LARS) and computes them in adaptive chunks, several in an iteration. (Long ones would be cut in dozens, each of which
pays for an iteration, and the time line that other prompts wait for would no longer come true.) Chunks on groups run
alone on their instances: a group computes in lockstep, so an iteration of one instance cannot be shared without all
others waiting.

Instead a group yields in time: a shorter prompt goes before it while it waits, and pauses it at a layer's edge while it
runs, if that gives an earlier first token than the plan. To much shorter ones the group yields a share of its time
(`weave_groups`), which follows its relative slack as space sharing does, and more to such of them as would miss their
own deadlines: without that, shorts wait for minutes once groups fill the pool. To other shorter ones it yields while
it stays in time itself; to late ones of any size also until it has yielded as much as they would be late.

A prompt on one instance stops the whole group, and what waits behind that anywhere. So it enters only if it gains, in
units of the time within which its first token is due, at least what all of them lose in units of theirs (Smith's rule).
Entering an idle instance of a group that is paused already delays no other prompt and is preferred.

It is meant for clusters that decode elsewhere: a group starts when its instances' schedulers are empty. Where short
prompts would wait, some prefill on instances that decode (`weave_decodes`). KV is taken to be sent layer by layer while
it is computed (live, groups send it afterwards): a transfer begun with a group's span would block its paused sender.

Instances that compute whole prompts (`PolicyContext.whole_prompts`) decode where they prefill, and cannot be paused
from outside. There long prompts are groups of one in their schedulers, with a lower priority than what goes before
them (`EnqueueRequest.yields`): the iterations of the instance yield.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Annotated, NamedTuple, Self

import msgspec
from pydantic import Field, model_validator

from headway.core.errors import ConfigError
from headway.core.file_sections import PositiveOrZero
from headway.core.request import Request
from headway.core.span import Span, cut
from headway.perf.latency.groups import GroupShape
from headway.policy.placement import tetris
from headway.policy.placement.base import (
    Action,
    ActionRefused,
    CachedPrefix,
    CommitSpans,
    EnqueueRequest,
    Event,
    Phase,
    PlacementPolicy,
    PreemptRequest,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RequestPrefilled,
    ResumeRequest,
    SpanDone,
    SpanPaused,
)
from headway.policy.placement.cdsp_plan import ChunkAllocation
from headway.policy.placement.decode_placement import DecodePlacement
from headway.policy.placement.prefix_reuse import copy_seconds
from headway.policy.placement.registry import PolicyContext
from headway.policy.placement.tetris_rates import RateTable
from headway.policy.placement.view import ClusterSnapshot
from headway.policy.placement.weave_decodes import PrefillsBesideDecodes
from headway.policy.placement.weave_groups import PlacedGroup, PlacedGroups


class WeaveOptions(tetris.TetrisOptions):
    """Settings of `weave`, besides those of `tetris`."""

    batch_s: PositiveOrZero = 0.5
    """A prompt that the plan gives to one instance goes to its scheduler if it takes at most so long there; a longer
    one is a group of one."""
    yields_to: PositiveOrZero = 0.25
    """A group yields a share of its time to prompts that take, on one instance, at most so many times what its own
    would, to others only while it stays in time; 0: to none."""
    rho_min: PositiveOrZero = 0.2
    """Least share of its time that a group yields."""
    rho_max: Annotated[float, Field(lt=1)] = 0.7
    """Largest share of its time that a group yields."""
    deadline_base_s: PositiveOrZero = 1.0
    """Seconds after arrival at which the first token of a request without an SLO is due, at the earliest."""
    deadline_factor: PositiveOrZero = 5.0
    """The same as a multiple of the prompt's own time; the later of the two counts."""
    lost_s: PositiveOrZero = 0.0
    """Seconds to restore a paused group's state."""
    pause_s: Annotated[float, Field(gt=0)] = 0.05
    """A chunk whose group could be paused only after longer is cut into several."""
    beside_decodes: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Largest share of decodes' time that short prompts, where they would wait, prefill beside them; 0: none do."""

    @model_validator(mode="after")
    def _possible_together(self) -> Self:
        if not self.rho_min <= self.rho_max:
            raise ValueError("`rho_min` must be at most `rho_max`")
        if not self.anchored:
            raise ValueError("`anchored: false` is for tetris alone: weave's schedulers do not keep to a plan")
        return self


class QueueGap(NamedTuple):
    """A place before all groups of an instance. Compared by the first three fields."""

    first_token_s: float
    """When the first token of a prompt there would come."""
    stopped_instances: int
    """Instances that have to stop for it."""
    instance: int
    charges: tuple[tuple[PlacedGroup, float], ...]
    """Seconds by which each group would be delayed."""
    to_pause: PlacedGroup | None
    """The running group that has to be paused, or is on its way to a pause."""


class WeavePlacement(PlacementPolicy):
    """See the module."""

    def __init__(self, context: PolicyContext, options: WeaveOptions) -> None:
        self.tetris = tetris.TetrisPlacement(context, options)
        self.groups = PlacedGroups()
        self._context, self._latency, self._options = context, context.latency, options
        self._decodes = DecodePlacement()
        self._beside_decodes = PrefillsBesideDecodes(context.latency, options.beside_decodes, self._decodes)
        self._requests: dict[str, Request] = {}
        self._scheduler_of: dict[str, int] = {}  # instance of each prompt in a scheduler
        self._prefills_end_s: dict[int, float] = {}  # when each scheduler's prompts are expected to be done

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        self._beside_decodes.note(view)
        if isinstance(event, RequestArrived):
            self._requests[event.request.id] = event.request
            self.tetris.note_cached(event)
            return self._place(event.request, view)
        if isinstance(event, SpanPaused):
            self._set_pausing(event.request, False)
            self.groups.resume(event.request, view)
            # at once: its exclusive span waits anyway until the prompts let in have left the schedulers
            return [ResumeRequest(event.request, self._options.lost_s)]
        if isinstance(event, RequestPrefilled):
            self._left_scheduler(event.request, view)
            self.groups.remove(event.request)  # where instances compute whole prompts
            return self._decodes.prefilled(event.request)
        if isinstance(event, ActionRefused):
            return self._refused(event, view)
        if isinstance(event, SpanDone):
            self._advance(event)
            return self._decodes.prefilled(event.request) if event.last else []
        if isinstance(event, RequestFinished | RequestDropped):
            self._left_scheduler(event.request, view)
            self.groups.remove(event.request)
            self._requests.pop(event.request, None)
            self.tetris.forget_cached(event.request)
        return self._decodes.on_event(event)

    def replace_rates(self, table: RateTable) -> None:
        """See `LoadAwareRates`."""
        self.tetris.replace_rates(table)

    # -- where a prompt goes ------------------------------------------------------------------------------------------

    def _place(self, request: Request, view: ClusterSnapshot) -> list[Action]:
        whole = self._context.whole_prompts
        if request.max_output_tokens > 1 and not whole and not view.with_role("decode"):
            raise ConfigError("weave needs instances of role decode: groups wait for decodes on their instances")
        request, plan, prefix = self.tetris.plan_behind_prefix(request, view)
        alone_s = self._alone_s(request)
        alone_s += 0.0 if prefix is None else prefix.copy_s  # of a copy to any one instance
        gap = None
        if self._options.yields_to:
            times = self._times_on(request, alone_s)
            gap = self._best_gap(request, times, plan.ttft_s, view)
            due_s = request.arrival_s + self._due_s(request, alone_s)
            # Late where it would go: groups yield beyond their shares, as schedulers under `jsq` would.
            if (late_s := (view.now_s + plan.ttft_s if gap is None else gap.first_token_s) - due_s) > 0:
                gap = self._best_gap(request, times, plan.ttft_s, view, late_s)
            first_token_s = view.now_s + plan.ttft_s if gap is None else gap.first_token_s
            if (decode := self._beside_decodes.choose(request, first_token_s, view)) is not None:
                return [EnqueueRequest(request.id, (decode,))]
        if gap is not None:
            # charged when granted: later prompts see what is left of each group's share
            for placed, seconds in gap.charges:
                placed.delay(seconds)
            alone_s = times.get(gap.instance, times[None])
            actions = self._enqueue(request, gap.instance, alone_s, view, prefix, concurrent=True)
            # one pause serves all prompts that enter during it
            if gap.to_pause is not None and not gap.to_pause.pausing:
                gap.to_pause.pausing = True
                actions.append(PreemptRequest(gap.to_pause.request))
            return actions
        spans = self.tetris.spans(plan, request, view)
        if len(spans) == 1 and len(spans[0].group) == 1 and alone_s <= self._options.batch_s:
            return self._enqueue(request, spans[0].group[0], alone_s, view, prefix, concurrent=False)
        if self._options.yields_to and not whole:
            spans = tuple(part for span in spans for part in self._pausable(span, view))
        self.groups.add(self._placed_group(request, plan, spans, view))
        if whole:
            return self._enqueue(request, spans[0].group[0], alone_s, view, prefix, concurrent=False)
        self._decodes.place(request, [span.group for span in spans], view)
        return [CommitSpans(request.id, spans, view.version, prefix=prefix)]

    def _enqueue(
        self,
        request: Request,
        instance: int,
        alone_s: float,
        view: ClusterSnapshot,
        prefix: CachedPrefix | None,
        concurrent: bool,
    ) -> list[Action]:
        """Give a prompt to an instance's scheduler; not concurrent: behind the groups that were committed there."""
        self._decodes.place(request, [(instance,)], view)  # one transfer, when the prompt is complete
        self._scheduler_of[request.id] = instance
        # behind groups, the prompt is not yet part of the scheduler's work
        if concurrent or not self.groups.on(instance):
            self._prefills_end_s[instance] = self._scheduler_idle_s(instance, view) + alone_s
        # a long prompt itself, and what is not to go before one
        behind = self._context.whole_prompts and not concurrent and bool(self.groups.on(instance))
        phase: Phase = "prefill" if request.max_output_tokens > 1 else "all"  # one token: nothing to decode elsewhere
        if prefix is not None and not self._context.copies_prefixes:
            prefix = prefix if prefix.instance == instance else None
        elif prefix is not None:
            # planned for a group that may be another
            copy_s = copy_seconds(prefix.tokens, prefix.instance, (instance,), view, self._context)
            prefix = CachedPrefix(prefix.instance, prefix.tokens, copy_s)
        return [EnqueueRequest(request.id, (instance,), phase, concurrent, prefix, behind)]

    def _pausable(self, span: Span, view: ClusterSnapshot) -> list[Span]:
        """Return a chunk as chunks between whose layers the group can be paused every `pause_s` or so."""
        members, tokens = len(span.group), span.end - span.start
        shape = GroupShape(members, view.nodes_of(span.group), span.strategy)
        seconds = self._latency.prefill_s(span.start, tokens, shape)
        interval_s = self._context.pause_interval_s(span.start, span.end, shape, seconds)
        parts = max(1, math.ceil(interval_s / self._options.pause_s))
        pieces = cut(span.start, span.end, members, math.ceil(tokens / (parts * members)))
        return [msgspec.structs.replace(span, start=start, end=end) for start, end in pieces]

    def _placed_group(
        self, request: Request, plan: ChunkAllocation, spans: Sequence[Span], view: ClusterSnapshot
    ) -> PlacedGroup:
        """Return a committed prompt with its plan's time line, chunk by chunk."""
        starts_s, pause_intervals_s, work_s, now = [], [], 0.0, view.now_s
        for span in spans:
            # a chunk starts after the previous one, when the last instance of its group is free
            start_s = max(now, *(view.instances[i].free_at_s for i in span.group))
            shape = GroupShape(len(span.group), view.nodes_of(span.group), span.strategy)
            seconds = self._latency.prefill_s(span.start, span.end - span.start, shape)
            starts_s.append(start_s)
            pause_intervals_s.append(self._context.pause_interval_s(span.start, span.end, shape, seconds))
            work_s += seconds
            now = start_s + seconds
        due_s = self._due_s(request, work_s)
        line = [span.group for span in spans], starts_s, pause_intervals_s, now, work_s, self._alone_s(request)
        return PlacedGroup(request.id, *line, request.arrival_s + due_s, due_s, request.prompt_tokens)

    def _alone_s(self, request: Request) -> float:
        """Return the time of a whole prompt's uncached part on one instance."""
        cached = request.cached_tokens
        return self._latency.prefill_s(cached, request.prompt_tokens - cached, GroupShape(1))

    def _due_s(self, request: Request, work_s: float) -> float:
        """Return the seconds within which a request's first token is due. work_s: the prompt's own time."""
        if request.slo.ttft_s is not None:
            return request.slo.ttft_s
        return max(self._options.deadline_base_s, self._options.deadline_factor * work_s)

    # -- before groups -----------------------------------------------------------------------------------------------

    def _times_on(self, request: Request, alone_s: float) -> dict[int | None, float]:
        """Return the prompt's time on one instance, by instance; None: on all others. Instances that copy no prefixes
        each begin behind their own."""
        own = self.tetris.own_prefix(request.id)
        if own is None:
            return {None: alone_s}
        whole, alone = request.prompt_tokens, GroupShape(1)
        behind_s = self._latency.prefill_s(own.tokens, whole - own.tokens, alone)
        return {own.instance: behind_s, None: self._latency.prefill_s(0, whole, alone)}

    def _best_gap(
        self,
        request: Request,
        times_s: Mapping[int | None, float],
        plan_s: float,
        view: ClusterSnapshot,
        late_s: float | None = None,
    ) -> QueueGap | None:
        """Return the place before groups with the earliest first token, of equal ones that which stops the fewest
        instances; None if the plan is as good. times_s: see `_times_on`. plan_s: seconds until the plan's first token.
        late_s: by how much the prompt would be late where groups keep to their shares; None: they do."""
        now, options = view.now_s, self._options
        idle_s = {i: self._scheduler_idle_s(i, view) for i in self.groups.occupied()}
        yields: dict[float, dict[str, tuple[float, float]]] = {alone_s: {} for alone_s in times_s.values()}
        for alone_s, placed in product(yields, self.groups.all()):
            # while the group stays in time, or has not yielded as much as the prompt would be late
            left_s = max(placed.deadline_s - max(now, placed.end_s), (late_s or 0.0) - placed.yielded_s)
            if alone_s <= options.yields_to * placed.alone_s:
                left_s = placed.yieldable_s(now, options.rho_min, options.rho_max) if late_s is None else math.inf
            elif late_s is None and alone_s > placed.alone_s:
                left_s = -1.0  # below any charge, 0 included
            # without the prompt, a running or pausing group would go on now, a waiting one as planned; neither
            # before the schedulers of its instances are empty
            begins_s = now if self._can_stop(placed, view) else max(now, placed.starts_s[placed.index])
            yields[alone_s][placed.request] = max(begins_s, *(idle_s[i] for i in placed.group)), left_s
        best: QueueGap | None = None
        for i, scheduler_idle_s in idle_s.items():
            alone_s, room = times_s.get(i, times_s[None]), self._has_room(i, request.prompt_tokens, view)
            gap = self._gap(i, scheduler_idle_s, alone_s, yields[alone_s], view) if room else None
            if gap is None or gap.first_token_s >= now + plan_s or (best is not None and gap[:3] >= best[:3]):
                continue
            lost = sum(seconds / placed.due_s for placed, seconds in self.groups.delayed(gap.charges))
            if now + plan_s - gap.first_token_s >= lost * self._due_s(request, alone_s):
                best = gap
        return best

    def _gap(
        self,
        instance: int,
        idle_s: float,
        alone_s: float,
        yields: dict[str, tuple[float, float]],
        view: ClusterSnapshot,
    ) -> QueueGap | None:
        """Return the place before all groups of an instance; None if one of them cannot yield enough. idle_s: when the
        instance's scheduler is empty. yields: of each group, when it would continue without this prompt, and the
        seconds that it may still yield."""
        groups = self.groups.on(instance)
        first = groups[0]
        # groups of one prompt are nested: the instance may belong to a later, larger chunk only, and need no pause
        to_pause = first if instance in first.group and self._can_stop(first, view) else None
        if to_pause is not None:
            idle_s += first.pause_interval_s  # until it has paused, at most
        first_token_s = idle_s + alone_s
        charges = []
        for placed in groups:
            goes_on_s, left_s = yields[placed.request]
            # the prompt delays every group of the instance until its first token
            charge = max(0.0, first_token_s - goes_on_s)
            if charge > left_s:
                return None
            charges.append((placed, charge))
        # a group that is pausing already stops no further instances
        stopped = len(to_pause.group) if to_pause is not None and not to_pause.pausing else 0
        return QueueGap(first_token_s, stopped, instance, tuple(charges), to_pause)

    def _has_room(self, instance: int, tokens: int, view: ClusterSnapshot) -> bool:
        """Return whether a prompt's KV fits beside that of groups that have begun there. Else the prompt would wait for
        a group's KV, and the group for the prompt."""
        capacity = view.instances[instance].capacity
        groups = self.groups.on(instance)
        begun = [placed for placed in groups if placed.begun or self._can_stop(placed, view)]
        if self._context.whole_prompts:
            begun = list(groups[:1])
        # a twentieth for blocks that are not full
        return not capacity or tokens + sum(placed.tokens / len(placed.group) for placed in begun) <= 0.95 * capacity

    def _can_stop(self, placed: PlacedGroup, view: ClusterSnapshot) -> bool:
        """Return whether a group runs now where it can be paused, perhaps on its way to that."""
        return not self._context.whole_prompts and (placed.pausing or self.groups.is_running(placed, view))

    def _scheduler_idle_s(self, instance: int, view: ClusterSnapshot) -> float:
        """Return when an instance's scheduler is expected to be without work."""
        if not view.instances[instance].running:
            return view.now_s
        return max(view.now_s, self._prefills_end_s.get(instance, 0.0))

    # -- later events -------------------------------------------------------------------------------------------------

    def _set_pausing(self, request: str, pausing: bool) -> None:
        if (placed := self.groups.get(request)) is not None:
            placed.pausing = pausing

    def _advance(self, event: SpanDone) -> None:
        if (placed := self.groups.get(event.request)) is None:
            return
        # a span that completes before its pause takes effect is not paused
        placed.pausing = False
        if event.last:
            self.groups.remove(event.request)
        else:
            self.groups.advance(placed)

    def _left_scheduler(self, request: str, view: ClusterSnapshot) -> None:
        """Note that a prompt has left its scheduler."""
        if (instance := self._scheduler_of.pop(request, None)) is not None and not view.instances[instance].running:
            self._prefills_end_s[instance] = view.now_s

    def _refused(self, event: ActionRefused, view: ClusterSnapshot) -> Sequence[Action]:
        """Place a refused commitment again. A refused preemption (the group ended, or is in its last layer) leaves the
        short prompt behind the group."""
        if event.action == "preempt":
            self._set_pausing(event.request, False)
        elif event.action == "commit":
            self.groups.remove(event.request)
            self._decodes.withdraw(event.request)
            return self._place(self._requests[event.request], view)
        return []
