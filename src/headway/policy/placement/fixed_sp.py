"""Fixed-SP scheduling (Tetris §7.1): prefill instances in independent groups of one size, kept inside nodes.

A request goes, whole, to the group with the lowest queuing delay, in order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.request import Request
from headway.core.span import AttentionStrategy, Span, Strategy
from headway.policy.placement.base import (
    Action,
    ActionRefused,
    CommitSpans,
    Event,
    RequestArrived,
    RequestDropped,
    RequestFinished,
)
from headway.policy.placement.decode import DecodeSide
from headway.policy.placement.groups import prefilling
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.policy.placement.view import ClusterSnapshot


class FixedSpOptions(PolicyOptions, frozen=True, kw_only=True):
    """sp: instances of a group; 0: all of them."""

    sp: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sp < 0:
            raise ValueError(f"`sp` must be at least 1, or 0 for all instances, not {self.sp}")


class FixedSp:
    """See the module."""

    def __init__(
        self,
        surroundings: PolicyContext,
        options: FixedSpOptions,
        attn: AttentionStrategy = "striped",
        name: str = "fixed-sp",
    ) -> None:
        """name: what errors call it."""
        self._sp, self._attn, self._name = options.sp, attn, name
        self._decodes = DecodeSide()
        self._groups: tuple[tuple[int, ...], ...] = ()
        self._requests: dict[str, Request] = {}

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if isinstance(event, RequestArrived):
            self._requests[event.request.id] = event.request
            return self._place(event.request, view)
        if isinstance(event, ActionRefused) and event.verb == "commit":
            self._decodes.withdraw(event.request)
            return self._place(self._requests[event.request], view)
        if isinstance(event, RequestFinished | RequestDropped):
            self._requests.pop(event.request, None)
        return self._decodes.on_event(event)

    def next_wakeup(self, now: float) -> float | None:
        return None

    def _place(self, request: Request, view: ClusterSnapshot) -> Sequence[Action]:
        groups = self._groups or self._cut(view)
        free = [max(view.now_s, *(view.instances[i].free_at_s for i in group)) for group in groups]
        group = groups[min(range(len(groups)), key=free.__getitem__)]
        attn = self._attn if len(group) > 1 else "local"
        span = Span(
            request=request,
            start=request.cached_tokens,
            end=request.prompt_tokens,
            group=group,
            strategy=Strategy(attn=attn),
        )
        return [CommitSpans(request.id, (span,), view.version), *self._decodes.place(request, [group], view)]

    def _cut(self, view: ClusterSnapshot) -> tuple[tuple[int, ...], ...]:
        """Consecutive instances, node by node; what is left over makes no group unless nothing else does."""
        able = view.ordered(prefilling(view, self._name))
        sp = min(self._sp or len(able), len(able))
        self._groups = tuple(able[i : i + sp] for i in range(0, len(able) - sp + 1, sp))
        return self._groups
