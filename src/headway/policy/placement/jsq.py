"""Join the shortest queue: independent replicas, each with its own scheduler (Medha's replicas, in its evaluation).

A request goes whole to one replica when it arrives, and is never moved; the replica's scheduler decides its order and
its chunks (LARS and adaptive chunks unless the scenario says otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from headway.core.errors import ConfigError
from headway.policy.placement.base import Action, EnqueueRequest, Event, PlacementPolicy, RequestArrived
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.policy.placement.view import ClusterSnapshot


class JsqOptions(PolicyOptions):
    """Settings of `jsq`."""

    queue: Literal["seconds", "tokens", "requests"] = "seconds"
    """A queue's length: the predicted seconds of its prefills; their tokens, which leave out that attention is
    quadratic; or the number of requests with decodes, as a load balancer without predictions counts."""


class JoinShortestQueue(PlacementPolicy):
    """See the module. Ties go to the replica with fewer requests, then to the lower id."""

    def __init__(self, context: PolicyContext, options: JsqOptions) -> None:
        self._queue = options.queue

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if not isinstance(event, RequestArrived):
            return []
        replicas = view.with_role("mixed")
        if not replicas:
            raise ConfigError("jsq needs instances of role mixed: replicas that prefill and decode")
        shortest = min(replicas, key=lambda i: (self._queue_length(view, i), i))
        return [EnqueueRequest(event.request.id, (shortest,))]

    def _queue_length(self, view: ClusterSnapshot, replica: int) -> tuple[float, int]:
        """(length in the chosen unit, what decides between equal lengths)."""
        instance = view.instances[replica]
        if self._queue == "requests":
            return instance.running, instance.queued
        # idle replicas all count as 0, whenever they became free
        wait_s = max(0.0, instance.free_at_s - view.now_s)
        return wait_s if self._queue == "seconds" else instance.queued, instance.running
