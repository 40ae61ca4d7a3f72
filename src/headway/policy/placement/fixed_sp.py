"""Fixed-SP scheduling (Tetris §7.1): prefill instances in independent groups of one size, kept inside nodes.

A request goes, whole, to the group with the lowest queuing delay, in order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.file_sections import CountOrZero
from headway.core.request import Request
from headway.core.span import AttentionStrategy, Span, Strategy
from headway.policy.placement.base import (
    Action,
    ActionRefused,
    CommitSpans,
    Event,
    PlacementPolicy,
    RequestArrived,
    RequestDropped,
    RequestFinished,
)
from headway.policy.placement.decode_placement import DecodePlacement
from headway.policy.placement.groups import prefill_instances
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.policy.placement.view import ClusterSnapshot


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
        groups = self._groups or self._make_groups(view)
        # a group begins when its last instance is free; ties go to the first group
        free_s = [max(view.now_s, *(view.instances[i].free_at_s for i in group)) for group in groups]
        group = groups[min(range(len(groups)), key=free_s.__getitem__)]
        attn = self._attn if len(group) > 1 else "local"
        span = Span(
            request=request,
            start=request.cached_tokens,
            end=request.prompt_tokens,
            group=group,
            strategy=Strategy(attn=attn),
        )
        return [CommitSpans(request.id, (span,), view.version), *self._decodes.place(request, [group], view)]

    def _make_groups(self, view: ClusterSnapshot) -> tuple[tuple[int, ...], ...]:
        """Cut the instances into consecutive groups, node by node; a remainder stays unused unless it is everything."""
        instances = view.ordered(prefill_instances(view, self._name))
        sp = min(self._sp or len(instances), len(instances))
        self._groups = tuple(instances[i : i + sp] for i in range(0, len(instances) - sp + 1, sp))
        return self._groups
