"""Priority, as PecSched §6.2 sets Past-Future up: short requests first, long ones when no short one waits for them.

Short requests join the instance whose queue is free first. A long request waits in a queue of its own, in order, until
`long_sp` instances at once have nothing to do; once it runs it is not preempted. Under a steady stream of short
requests that moment never comes: long requests starve (§3.2, Table 2). With `beside` it is kinder than the paper: no
prompt may wait or run there, but decodes may, and go on beside the long prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.request import Request
from headway.policy.placement.base import (
    Action,
    EnqueueRequest,
    Event,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RequestPrefilled,
    SpanDone,
)
from headway.policy.placement.groups import first_free_group, least_loaded, prefilling, ring_commit
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.policy.placement.view import ClusterSnapshot


class PriorityOptions(PolicyOptions, frozen=True, kw_only=True):
    """long_tokens: prompts above this are long; long_sp: instances that a long one takes; beside: decodes may be there;
    retry_s: how often a waiting one looks again, besides at every end of a request."""

    long_tokens: int = 32_768
    long_sp: int = 4
    beside: bool = False
    retry_s: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.long_sp < 1 or self.long_tokens < 0 or not self.retry_s > 0:
            raise ValueError("`long_sp` must be at least 1, `long_tokens` at least 0 and `retry_s` above 0 seconds")


class PriorityPlacement:
    """See the module."""

    def __init__(self, surroundings: PolicyContext, options: PriorityOptions) -> None:
        self._options = options
        self._longs: dict[str, Request] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._wake_s = 0.0

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """See Placement."""
        actions: list[Action] = []
        if isinstance(event, RequestArrived):
            request, able = event.request, prefilling(view, "priority")
            if request.prompt_tokens <= self._options.long_tokens:
                return [EnqueueRequest(request.id, (least_loaded(view, able),))]
            self._longs[request.id] = request
        elif isinstance(event, SpanDone) and event.last:
            group = self._groups[event.request]
            actions.append(EnqueueRequest(event.request, group, "decode", beside=True))
        elif isinstance(event, RequestFinished | RequestDropped):
            self._groups.pop(event.request, None)
            self._longs.pop(event.request, None)
        elif isinstance(event, RequestPrefilled):
            return []
        if self._longs:
            actions += self._begin(view)
        return actions

    def next_wakeup(self, now: float) -> float | None:
        """See Placement."""
        if not self._longs:
            return None
        if self._wake_s <= now:
            self._wake_s = now + self._options.retry_s
        return self._wake_s

    def _begin(self, view: ClusterSnapshot) -> list[Action]:
        """The first of the long requests, if it can begin at this very moment."""
        taken = {i for group in self._groups.values() for i in group}
        able = view.with_role("mixed", "prefill")
        idle = [i for i in able if i not in taken and self._idle(i, view)]
        size = min(self._options.long_sp, len(able))
        if not able or len(idle) < size:
            return []
        request = self._longs.pop(next(iter(self._longs)))
        group = first_free_group(view, idle, size)
        self._groups[request.id] = group
        return [ring_commit(request, group, view, beside=self._options.beside)]

    def _idle(self, instance: int, view: ClusterSnapshot) -> bool:
        at = view.instances[instance]
        if at.queued or at.free_at_s > view.now_s:
            return False
        return self._options.beside or not at.running
