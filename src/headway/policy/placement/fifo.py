"""FIFO, as vLLM behind one queue: requests are placed strictly in order of arrival, and none overtakes on an instance.

A short request joins the instance whose queue is free first. A long one takes `long_sp` instances as one ring, node
first, when all of them are free: later arrivals on these instances wait, which is the head-of-line blocking that
PecSched §3.2 measures. It decodes on the same group.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.file_sections import Count, CountOrZero
from headway.core.request import Request
from headway.policy.placement.base import (
    Action,
    EnqueueRequest,
    Event,
    PlacementPolicy,
    RequestArrived,
    SpanDone,
)
from headway.policy.placement.groups import commit_as_ring, first_free_group, least_loaded, prefill_instances
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.policy.placement.view import ClusterSnapshot


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
        candidates = prefill_instances(view, "fifo")
        if request.prompt_tokens <= self._options.long_tokens:
            return [EnqueueRequest(request.id, (least_loaded(view, candidates),))]
        # committed at once, not when the group is free: arrivals after it wait behind it
        group = first_free_group(view, candidates, min(self._options.long_sp, len(candidates)))
        self._groups[request.id] = group
        return [commit_as_ring(request, group, view)]
