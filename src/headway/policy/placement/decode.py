"""Where a request decodes when prefill instances only prefill: by freeness with virtual usage (Tetris §5.2, Llumnix).

The decode instance is chosen when the prefill is placed, so that KV can be sent there as it is computed. Freeness is
free slots over running requests; slots of requests whose KV is still on its way count as used (virtual usage).
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.request import Request
from headway.policy.placement.base import (
    Action,
    EnqueueRequest,
    Event,
    KvReady,
    RequestDropped,
    RequestFinished,
    SpanDone,
    TransferKv,
)
from headway.policy.placement.view import ClusterSnapshot


class DecodeSide:
    """What a disaggregated policy does about decodes. Where a cluster has no decode instances, requests decode on the
    group of their last span."""

    def __init__(self) -> None:
        self._virtual: dict[str, tuple[int, int]] = {}
        self._on_way: dict[int, int] = {}
        self._groups: dict[str, tuple[int, ...]] = {}

    def choose(self, view: ClusterSnapshot) -> int | None:
        """The freest decode instance; ties to the lower id. None where there is none."""
        best, most = None, -float("inf")
        for i in view.with_role("decode"):
            free = self.freeness(view, i)
            if free > most:
                best, most = i, free
        return best

    def freeness(self, view: ClusterSnapshot, instance: int) -> float:
        """Free slots, without those that are spoken for, per running request."""
        at = view.instances[instance]
        return (at.capacity - at.used - self._on_way.get(instance, 0)) / max(1, at.running)

    def place(self, request: Request, groups: Sequence[tuple[int, ...]], view: ClusterSnapshot) -> list[Action]:
        """A prefill of these spans is about to be committed: the transfers that go with it."""
        if request.max_output_tokens <= 1:
            return []
        target = self.choose(view)
        if target is None:
            self._groups[request.id] = groups[-1]
            return []
        self._virtual[request.id] = (target, request.prompt_tokens)
        self._on_way[target] = self._on_way.get(target, 0) + request.prompt_tokens
        return [TransferKv(request.id, target, index) for index in range(len(groups))]

    def prefilled(self, request: str) -> list[Action]:
        """A prompt that was placed without spans is complete, on an instance that sent its KV as it was computed."""
        target, _ = self._virtual.get(request, (-1, 0))
        return [TransferKv(request, target, overlapped=True)] if target >= 0 else []

    def withdraw(self, request: str) -> None:
        """The prefill was not committed after all."""
        self._groups.pop(request, None)
        target, tokens = self._virtual.pop(request, (-1, 0))
        if target >= 0:
            self._on_way[target] -= tokens

    def on_event(self, event: Event) -> list[Action]:
        """What follows from an event that concerns decodes; nothing from others."""
        if isinstance(event, KvReady):
            self.withdraw(event.request)
            return [EnqueueRequest(event.request, (event.instance,), "decode")]
        if isinstance(event, SpanDone) and event.last:
            group = self._groups.pop(event.request, None)
            return [] if group is None else [EnqueueRequest(event.request, group, "decode")]
        if isinstance(event, RequestFinished | RequestDropped):
            self.withdraw(event.request)
        return []
