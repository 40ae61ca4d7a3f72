"""FIFO, as vLLM behind one queue: requests are placed strictly in order of arrival, and none overtakes on an instance.

A short request joins the instance whose queue is free first. A long one takes `long_sp` instances as one ring, node
first, when all of them are free: what arrives behind it on these instances waits, which is the head-of-line blocking
that PecSched §3.2 measures. Its decode goes on on the same group.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.request import Request
from headway.policy.placement.base import Action, EnqueueRequest, Event, RequestArrived, SpanDone
from headway.policy.placement.groups import first_free_group, least_loaded, prefilling, ring_commit
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.policy.placement.view import ClusterSnapshot


class FifoOptions(PolicyOptions, frozen=True, kw_only=True):
    """long_tokens: prompts above this are long; long_sp: instances that a long one takes."""

    long_tokens: int = 32_768
    long_sp: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.long_sp < 1 or self.long_tokens < 0:
            raise ValueError("`long_sp` must be at least 1 and `long_tokens` at least 0")


class FifoPlacement:
    """See the module."""

    def __init__(self, surroundings: PolicyContext, options: FifoOptions) -> None:
        self._options = options
        self._groups: dict[str, tuple[int, ...]] = {}

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if isinstance(event, RequestArrived):
            return self._place(event.request, view)
        if isinstance(event, SpanDone) and event.last:
            return [EnqueueRequest(event.request, self._groups.pop(event.request), "decode")]
        return []

    def next_wakeup(self, now: float) -> float | None:
        return None

    def _place(self, request: Request, view: ClusterSnapshot) -> Sequence[Action]:
        able = prefilling(view, "fifo")
        if request.prompt_tokens <= self._options.long_tokens:
            return [EnqueueRequest(request.id, (least_loaded(view, able),))]
        group = first_free_group(view, able, min(self._options.long_sp, len(able)))
        self._groups[request.id] = group
        return [ring_commit(request, group, view)]
