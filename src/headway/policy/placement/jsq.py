"""Join the shortest queue: independent replicas, each with its own scheduler (Medha's replicas, in its evaluation).

A request goes whole to one replica when it arrives, and is never moved; the replica's scheduler decides its order and
its chunks (LARS and adaptive chunks unless the scenario says otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import model_validator

from headway.core.errors import ConfigError
from headway.policy.placement.base import (
    Action,
    CachedPrefix,
    EnqueueRequest,
    Event,
    PlacementPolicy,
    RequestArrived,
)
from headway.policy.placement.prefix_reuse import AffinityOptions, PrefixStart, cheapest_start
from headway.policy.placement.registry import PolicyContext
from headway.policy.placement.view import ClusterSnapshot


class JsqOptions(AffinityOptions):
    """Settings of `jsq`."""

    queue: Literal["seconds", "tokens", "requests"] = "seconds"
    """A queue's length: the predicted seconds of its prefills; their tokens, which leave out that attention is
    quadratic; or the number of requests with decodes, as a load balancer without predictions counts."""

    @model_validator(mode="after")
    def _measurable_affinity(self) -> Self:
        if self.affinity and self.queue == "requests":
            raise ValueError("`affinity` compares work: give `queue: seconds` or `queue: tokens`")
        return self


class JoinShortestQueue(PlacementPolicy):
    """See the module. Ties go to the replica with fewer requests, then to the lower id."""

    def __init__(self, context: PolicyContext, options: JsqOptions) -> None:
        self._queue, self._affinity, self._context = options.queue, options.affinity, context

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if not isinstance(event, RequestArrived):
            return []
        replicas = view.with_role("mixed")
        if not replicas:
            raise ConfigError("jsq needs instances of role mixed: replicas that prefill and decode")
        starts: dict[int, PrefixStart] = {}
        if self._affinity and event.cached:
            starts = {i: self._start(event, i, view) for i in replicas}
        none = PrefixStart(None, 0.0)
        shortest = min(replicas, key=lambda i: (self._queue_length(view, i, starts.get(i, none).seconds), i))
        return [EnqueueRequest(event.request.id, (shortest,), prefix=starts.get(shortest, none).prefix)]

    def _start(self, event: RequestArrived, replica: int, view: ClusterSnapshot) -> PrefixStart:
        """Return how the request would begin on a replica, with its work there in the queue's unit."""
        if self._queue == "seconds":
            return cheapest_start(event.request, event.cached, replica, view, self._context)
        own = event.cached[replica]
        return PrefixStart(CachedPrefix(replica, own) if own else None, max(1, event.request.prompt_tokens - own))

    def _queue_length(self, view: ClusterSnapshot, replica: int, added: float) -> tuple[float, int]:
        """Return (length in the chosen unit with `added` work, what decides between equal lengths)."""
        instance = view.instances[replica]
        if self._queue == "requests":
            return instance.running, instance.queued
        # idle replicas all count as 0, whenever they became free
        wait_s = max(0.0, instance.free_at_s - view.now_s)
        return added + (wait_s if self._queue == "seconds" else instance.queued), instance.running
