"""Priority, as PecSched §6.2 sets Past-Future up: short requests first, long ones on instances without work.

Short requests join the instance whose queue is free first. Long requests wait in one queue, in order of arrival, until
`long_sp` instances are without work at the same time; a running one is not preempted. Under a steady stream of short
requests that moment never comes: long requests starve (§3.2, Table 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from headway.core.file_sections import Count, CountOrZero, Positive
from headway.core.request import Request
from headway.policy.placement.base import (
    Action,
    EnqueueRequest,
    Event,
    PlacementPolicy,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RequestPrefilled,
    SpanDone,
)
from headway.policy.placement.groups import commit_as_ring, first_free_group, least_loaded, prefill_instances
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.policy.placement.view import ClusterSnapshot


class PriorityOptions(PolicyOptions):
    """Settings of `priority`."""

    renamed: ClassVar[Mapping[str, str]] = {"beside": "concurrent"}
    long_tokens: CountOrZero = 32_768
    """Prompts above this are long."""
    long_sp: Count = 4
    """Instances of a long prompt."""
    concurrent: bool = False
    """Kinder than the paper: a long prompt may begin on instances that only decode, and runs together with these."""
    retry_s: Positive = 0.1
    """How often a waiting long prompt is tried, besides at the end of each request."""


class PriorityPlacement(PlacementPolicy):
    """See the module."""

    def __init__(self, context: PolicyContext, options: PriorityOptions) -> None:
        self._options = options
        self._long_queue: dict[str, Request] = {}
        self._groups: dict[str, tuple[int, ...]] = {}  # of long requests that have begun
        self._wake_s = 0.0

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        actions: list[Action] = []
        if isinstance(event, RequestArrived):
            request, candidates = event.request, prefill_instances(view, "priority")
            if request.prompt_tokens <= self._options.long_tokens:
                return [EnqueueRequest(request.id, (least_loaded(view, candidates),))]
            self._long_queue[request.id] = request
        elif isinstance(event, SpanDone) and event.last:
            # it keeps its group until it ends: these instances do not count as idle for the next long request
            group = self._groups[event.request]
            actions.append(EnqueueRequest(event.request, group, "decode", concurrent=True))
        elif isinstance(event, RequestFinished | RequestDropped):
            self._groups.pop(event.request, None)
            self._long_queue.pop(event.request, None)
        elif isinstance(event, RequestPrefilled):
            return []
        if self._long_queue:
            actions += self._start_first_long(view)
        return actions

    def next_wakeup(self, now: float) -> float | None:
        if not self._long_queue:
            return None
        # kept until it has passed, so that a stream of events cannot postpone it
        if self._wake_s <= now:
            self._wake_s = now + self._options.retry_s
        return self._wake_s

    def _start_first_long(self, view: ClusterSnapshot) -> list[Action]:
        """Commit the first waiting long request if enough instances are without work now."""
        taken = {i for group in self._groups.values() for i in group}
        # not `prefill_instances`: after losses there may be none left, which is no error here
        candidates = view.with_role("mixed", "prefill")
        idle = [i for i in candidates if i not in taken and self._is_idle(i, view)]
        # a cluster smaller than `long_sp` serves long requests on all it has
        size = min(self._options.long_sp, len(candidates))
        if not candidates or len(idle) < size:
            return []
        request = self._long_queue.pop(next(iter(self._long_queue)))
        group = first_free_group(view, idle, size)
        self._groups[request.id] = group
        return [commit_as_ring(request, group, view, concurrent=self._options.concurrent)]

    def _is_idle(self, instance: int, view: ClusterSnapshot) -> bool:
        known = view.instances[instance]
        if known.queued or known.free_at_s > view.now_s:
            return False
        return self._options.concurrent or not known.running
