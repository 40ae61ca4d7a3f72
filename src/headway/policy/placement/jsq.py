"""Join the shortest queue: independent replicas, each with its own scheduler (Medha's replicas, in its evaluation).

A request goes whole to one replica when it arrives, and stays: what it waits for there, and in which chunks it is
computed, is the replica's scheduler's business (LARS and adaptive chunks unless the scenario says otherwise). A queue's
length is the predicted seconds of the prefills in it; or their tokens, which do not know that attention is quadratic;
or the number of requests, decodes included (what routers do that know nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from headway.core.errors import ConfigError
from headway.policy.placement.base import Action, EnqueueRequest, Event, RequestArrived
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.policy.placement.view import ClusterSnapshot


class JsqOptions(PolicyOptions, frozen=True, kw_only=True):
    """queue: what its length is counted in."""

    queue: Literal["seconds", "tokens", "requests"] = "seconds"


class JoinShortestQueue:
    """See the module. Of equal queues that with fewer requests, then the lower id."""

    def __init__(self, surroundings: PolicyContext, options: JsqOptions) -> None:
        self._queue = options.queue

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """See Placement."""
        if not isinstance(event, RequestArrived):
            return []
        able = view.with_role("mixed")
        if not able:
            raise ConfigError("jsq needs instances of role mixed: replicas that prefill and decode")
        return [EnqueueRequest(event.request.id, (min(able, key=lambda i: (self._length(view, i), i)),))]

    def next_wakeup(self, now: float) -> float | None:
        """See Placement."""
        return None

    def _length(self, view: ClusterSnapshot, i: int) -> tuple[float, int]:
        at = view.instances[i]
        if self._queue == "requests":
            return at.running, at.queued
        waiting = max(0.0, at.free_at_s - view.now_s) if self._queue == "seconds" else at.queued
        return waiting, at.running
