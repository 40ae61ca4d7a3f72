"""Weave: Tetris between instances, Medha inside them. No paper has the two together.

Tetris's planner (CDSP) decides where a prompt goes: which chunks, on which groups. A prompt that it gives to one
instance, whole, is handed to that instance's scheduler if it is short: that orders such prompts by relative slack
(LARS) and computes them in adaptive chunks, several in an iteration. (Long ones would be cut in dozens, each of which
pays for an iteration, and the time line that other rings wait for would no longer come true.) Chunks on groups run as
rings, alone on their instances: a ring's instances compute in lockstep, so an iteration of one of them cannot be shared
without all others waiting.

Instead a ring yields in time: a prompt that is much shorter than a ring goes in before it while it waits, and pauses it
at a layer's edge while it runs, if that gives an earlier first token than the plan, and as long as the ring stays
within its share of yielding (`weave_rings`), which follows its relative slack as space sharing does. What enters the
idle instances of a ring that is paused already delays nobody further and is preferred. A ring that has given its share
is not delayed again, so that nothing starves.

It is meant for clusters that decode elsewhere: a ring starts when its instances' schedulers are empty. KV is taken to
be sent layer by layer while it is computed, of rings too: a transfer that is begun with a ring's span would keep its
sender from others while the ring is paused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.core.span import Span
from headway.perf.latency.groups import GroupShape
from headway.policy.placement import tetris
from headway.policy.placement.base import (
    Action,
    ActionRefused,
    CommitSpans,
    EnqueueRequest,
    Event,
    Phase,
    PreemptRequest,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RequestPrefilled,
    ResumeRequest,
    SpanDone,
    SpanPaused,
)
from headway.policy.placement.cdsp_literal import ChunkAllocation
from headway.policy.placement.decode import DecodeSide
from headway.policy.placement.registry import PolicyContext
from headway.policy.placement.view import ClusterSnapshot
from headway.policy.placement.weave_groups import PlacedGroup, PlacedGroups


class WeaveOptions(tetris.TetrisOptions, frozen=True, kw_only=True):
    """Tetris's, and: batch_s: prompts that the plan gives to one instance go to its scheduler when they take at most so
    many seconds there; longer ones are rings of one. yields_to: a ring lets by prompts that take, on one instance, at
    most so many times what the ring takes; 0: none. rho_min, rho_max: least and largest share of its time that it
    yields. deadline_base_s, deadline_factor: without an SLO a first token is due after max(base, factor × the ring's
    own time). lost_s: seconds to restore a paused ring's state."""

    batch_s: float = 0.5
    yields_to: float = 0.25
    rho_min: float = 0.2
    rho_max: float = 0.7
    deadline_base_s: float = 1.0
    deadline_factor: float = 5.0
    lost_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.rho_min <= self.rho_max < 1:
            raise ValueError("`rho_min` must lie between 0 and `rho_max`, and `rho_max` below 1")
        for name in ("yields_to", "batch_s", "lost_s", "deadline_base_s", "deadline_factor"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must be at least 0")
        if not self.anchored:
            raise ValueError("`anchored: false` is for tetris alone: weave's schedulers do not keep to a plan")


class QueueGap(NamedTuple):
    """A place before the rings of an instance: when the first token would come, and what each ring would be charged."""

    first_s: float
    paused: int
    instance: int
    charges: tuple[tuple[PlacedGroup, float], ...]
    stop: PlacedGroup | None


class WeavePlacement:
    """See the module. `tetris.rates.replace(table)` updates improvement rates."""

    def __init__(self, surroundings: PolicyContext, options: WeaveOptions) -> None:
        self.tetris = tetris.TetrisPlacement(surroundings, options)
        self.rings = PlacedGroups()
        self._around, self._latency = surroundings, surroundings.latency
        self._options = options
        self._decodes = DecodeSide()
        self._requests: dict[str, Request] = {}
        self._at: dict[str, int] = {}
        self._emptied_s: dict[int, float] = {}

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """See Placement."""
        if isinstance(event, RequestArrived):
            self._requests[event.request.id] = event.request
            return self._place(event.request, view)
        if isinstance(event, SpanPaused):
            self._pausing(event.request, False)
            return [ResumeRequest(event.request, self._options.lost_s)]
        if isinstance(event, RequestPrefilled):
            self._left(event.request, view)
            return self._decodes.prefilled(event.request)
        if isinstance(event, ActionRefused):
            return self._refused(event, view)
        if isinstance(event, SpanDone):
            self._advance(event)
            return self._decodes.prefilled(event.request) if event.last else []
        if isinstance(event, RequestFinished | RequestDropped):
            self._left(event.request, view)
            self.rings.remove(event.request)
            self._requests.pop(event.request, None)
        return self._decodes.on_event(event)

    def next_wakeup(self, now: float) -> float | None:
        """See Placement."""
        return None

    # -- where a prompt goes ------------------------------------------------------------------------------------------

    def _place(self, request: Request, view: ClusterSnapshot) -> list[Action]:
        if request.max_output_tokens > 1 and not view.with_role("decode"):
            raise ConfigError("weave needs instances of role decode: rings wait for what decodes on their instances")
        plan = self.tetris.plan(request, view)
        alone_s = self._latency.prefill_s(request.cached_tokens, self._tokens(request), GroupShape(1))
        gap = self._best_gap(alone_s, plan.ttft_s, view) if self._options.yields_to else None
        if gap is not None:
            for ring, seconds in gap.charges:
                ring.delay(seconds)
            actions = self._enqueue(request, gap.instance, alone_s, view, beside=True)
            if gap.stop is not None and not gap.stop.pausing:
                gap.stop.pausing = True
                actions.append(PreemptRequest(gap.stop.request))
            return actions
        spans = self.tetris.spans(plan, request, view)
        if len(spans) == 1 and len(spans[0].group) == 1 and alone_s <= self._options.batch_s:
            (instance,) = spans[0].group
            return self._enqueue(request, instance, alone_s, view, beside=False)
        self.rings.add(self._ring(request, plan, spans, view))
        self._decodes.place(request, [span.group for span in spans], view)
        return [CommitSpans(request.id, spans, view.version)]

    def _enqueue(
        self, request: Request, instance: int, alone_s: float, view: ClusterSnapshot, beside: bool
    ) -> list[Action]:
        """Give a prompt to an instance's scheduler. Not beside: behind the rings that were committed there."""
        self._decodes.place(request, [(instance,)], view)  # its KV moves when it is complete
        self._at[request.id] = instance
        if beside or not self.rings.on(instance):
            self._emptied_s[instance] = self._empty_s(instance, view) + alone_s
        phase: Phase = "prefill" if request.max_output_tokens > 1 else "all"
        return [EnqueueRequest(request.id, (instance,), phase, beside)]

    def _ring(
        self, request: Request, plan: ChunkAllocation, spans: Sequence[Span], view: ClusterSnapshot
    ) -> PlacedGroup:
        """The plan's time line, chunk by chunk."""
        starts_s, edges_s, work_s, at = [], [], 0.0, view.now_s
        for span in spans:
            start_s = max(at, *(view.instances[i].free_at_s for i in span.group))
            shape = GroupShape(len(span.group), view.nodes_of(span.group), span.strategy)
            seconds = self._latency.prefill_s(span.start, span.end - span.start, shape)
            starts_s.append(start_s)
            edges_s.append(self._around.edge_s(span.start, span.end, shape, seconds))
            work_s += seconds
            at = start_s + seconds
        due_s = request.slo.ttft_s
        if due_s is None:
            due_s = max(self._options.deadline_base_s, self._options.deadline_factor * work_s)
        groups = [span.group for span in spans]
        return PlacedGroup(request.id, groups, starts_s, edges_s, at, work_s, request.arrival_s + due_s)

    @staticmethod
    def _tokens(request: Request) -> int:
        return request.prompt_tokens - request.cached_tokens

    # -- before rings -------------------------------------------------------------------------------------------------

    def _best_gap(self, alone_s: float, plan_s: float, view: ClusterSnapshot) -> QueueGap | None:
        """The place before rings with the earliest first token, of equal ones that which stops the fewest instances;
        None where the plan is as good. plan_s: seconds until the plan's first token."""
        now, options = view.now_s, self._options
        empty_s = {i: self._empty_s(i, view) for i in self.rings.occupied()}
        yields: dict[str, tuple[float, float]] = {}
        for ring in self.rings.all():
            left_s = -1.0  # too short to let this prompt by
            if alone_s <= options.yields_to * ring.work_s:
                left_s = ring.left_to_give_s(now, options.rho_min, options.rho_max)
            begins_s = now if self._stoppable(ring, view) else max(now, ring.starts_s[ring.index])
            yields[ring.request] = max(begins_s, *(empty_s[i] for i in ring.group)), left_s
        best: QueueGap | None = None
        for i, at_s in empty_s.items():
            gap = self._gap(i, at_s, alone_s, yields, view)
            if gap is not None and gap.first_s < now + plan_s and (best is None or gap[:3] < best[:3]):
                best = gap
        return best

    def _gap(
        self,
        instance: int,
        empty_s: float,
        alone_s: float,
        yields: dict[str, tuple[float, float]],
        view: ClusterSnapshot,
    ) -> QueueGap | None:
        """Before all rings of an instance; None where one of them does not yield so much. yields: of each ring, when it
        goes on if nobody else enters, and seconds that it may still give."""
        rings = self.rings.on(instance)
        head = rings[0]
        stop = head if instance in head.group and self._stoppable(head, view) else None
        if stop is not None:
            empty_s += head.edge_s  # until it has paused, at most
        first_s = empty_s + alone_s
        charges = []
        for ring in rings:
            goes_on_s, left_s = yields[ring.request]
            charge = max(0.0, first_s - goes_on_s)
            if charge > left_s:
                return None
            charges.append((ring, charge))
        paused = len(stop.group) if stop is not None and not stop.pausing else 0
        return QueueGap(first_s, paused, instance, tuple(charges), stop)

    def _stoppable(self, ring: PlacedGroup, view: ClusterSnapshot) -> bool:
        """Whether it is running, on its way to a pause perhaps."""
        return ring.pausing or self.rings.runs(ring, view)

    def _empty_s(self, instance: int, view: ClusterSnapshot) -> float:
        """When an instance's scheduler is expected to have nothing more to do."""
        if not view.instances[instance].running:
            return view.now_s
        return max(view.now_s, self._emptied_s.get(instance, 0.0))

    # -- what becomes of it -------------------------------------------------------------------------------------------

    def _pausing(self, request: str, pausing: bool) -> None:
        ring = self.rings.get(request)
        if ring is not None:
            ring.pausing = pausing

    def _advance(self, event: SpanDone) -> None:
        ring = self.rings.get(event.request)
        if ring is None:
            return
        ring.pausing = False
        if event.last:
            self.rings.remove(event.request)
        else:
            ring.index = event.index + 1

    def _left(self, request: str, view: ClusterSnapshot) -> None:
        """A prompt is no longer with a scheduler."""
        instance = self._at.pop(request, None)
        if instance is not None and not view.instances[instance].running:
            self._emptied_s[instance] = view.now_s

    def _refused(self, event: ActionRefused, view: ClusterSnapshot) -> Sequence[Action]:
        """A ring ended or was in its last layer when it was to be paused: what was to go in goes in behind it. A
        commitment is made anew."""
        if event.verb == "preempt":
            self._pausing(event.request, False)
        elif event.verb == "commit":
            self.rings.remove(event.request)
            self._decodes.withdraw(event.request)
            return self._place(self._requests[event.request], view)
        return []
