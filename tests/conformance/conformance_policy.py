"""A placement policy that gives some prompts to `jsq`, and hands over or pauses others: for `tests/conformance`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway.core.request import Request, Span
from headway.policy.placement.baselines import JoinShortestQueue, JsqOptions
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    Event,
    KvReady,
    PlacementPolicy,
    PreemptRequest,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RequestPrefilled,
    ResumeRequest,
    SpanDone,
    SpanPaused,
    TransferKv,
    WakeupDue,
)
from headway.policy.placement.registry import PolicyContext

HANDED_OVER, PAUSED, DECODE_PAUSED = 500, 2402, 510
"""Prompt tokens of the requests that are prefilled on instance 0 and decoded on 1; whose prefill on 0 is paused once;
and whose decode is."""
_PAUSE_AFTER_S = 0.02


class VerbOptions(JsqOptions):
    """Settings of `Verbs`."""

    heard: str
    """File to which the names of events of requests that `jsq` does not get are appended."""


class Verbs(PlacementPolicy):
    """See the module."""

    Options = VerbOptions

    def __init__(self, context: PolicyContext, options: VerbOptions) -> None:
        self._jsq, self._heard = JoinShortestQueue(context, options), Path(options.heard)
        self._requests: dict[str, Request] = {}
        self._pauses: dict[str, float] = {}
        """When to pause which request."""

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if isinstance(event, WakeupDue):
            due = [name for name, at in self._pauses.items() if at <= view.now_s]
            for name in due:
                del self._pauses[name]
            return [PreemptRequest(name) for name in due]
        if isinstance(event, RequestArrived) and event.request.prompt_tokens in (HANDED_OVER, PAUSED, DECODE_PAUSED):
            self._requests[event.request.id] = event.request
        name = event.request.id if isinstance(event, RequestArrived) else getattr(event, "request", "")
        if name not in self._requests:
            return self._jsq.on_event(event, view)
        with self._heard.open("a") as file:
            file.write(f"{type(event).__name__} {getattr(event, 'why', '')}\n")
        return self._of_own(event, self._requests[name], view)

    def _of_own(self, event: Event, request: Request, view: ClusterSnapshot) -> Sequence[Action]:
        name, tokens = request.id, request.prompt_tokens
        if isinstance(event, RequestArrived):
            if tokens == HANDED_OVER:
                return [EnqueueRequest(name, (0,), "prefill")]
            if tokens == PAUSED:
                self._pauses[name] = view.now_s + _PAUSE_AFTER_S
            return [CommitSpans(name, (Span(request=request, start=0, end=tokens, group=(0,)),), view.version)]
        if isinstance(event, RequestPrefilled):
            return [TransferKv(name, 1)]
        if isinstance(event, KvReady):
            return [EnqueueRequest(name, (1,), "decode")]
        if isinstance(event, SpanDone):
            self._pauses.pop(name, None)
            if tokens == DECODE_PAUSED:
                self._pauses[name] = view.now_s + _PAUSE_AFTER_S
            return [EnqueueRequest(name, (0,), "decode")]
        if isinstance(event, ActionRefused) and event.action == "preempt":
            # It waits for its turn, or has just ended.
            self._pauses[name] = view.now_s + _PAUSE_AFTER_S
        if isinstance(event, RequestFinished | RequestDropped):
            self._requests.pop(name)
            self._pauses.pop(name, None)
        if isinstance(event, SpanPaused):
            return [ResumeRequest(name) if tokens == PAUSED else EnqueueRequest(name, (0,), "decode")]
        return []

    def next_wakeup(self, now: float) -> float | None:
        return min(self._pauses.values(), default=None)
