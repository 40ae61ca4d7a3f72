"""Join the shortest queue: independent replicas, each with its own scheduler (Medha's replicas, in its evaluation).

A request goes whole to one replica when it arrives, and is never moved; the replica's scheduler decides its order and
its chunks (LARS and adaptive chunks unless the scenario says otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import model_validator

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.base import Action, EnqueueRequest, Event, PlacementPolicy, RequestArrived
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.policy.placement.view import ClusterSnapshot


class JsqOptions(PolicyOptions):
    """Settings of `jsq`."""

    queue: Literal["seconds", "tokens", "requests"] = "seconds"
    """A queue's length: the predicted seconds of its prefills; their tokens, which leave out that attention is
    quadratic; or the number of requests with decodes, as a load balancer without predictions counts."""
    affinity: bool = False
    """Whether a replica's queue counts what the request itself would add there: less where its prefix is cached."""

    @model_validator(mode="after")
    def _measurable_affinity(self) -> Self:
        if self.affinity and self.queue == "requests":
            raise ValueError("`affinity` compares work: give `queue: seconds` or `queue: tokens`")
        return self


class JoinShortestQueue(PlacementPolicy):
    """See the module. Ties go to the replica with fewer requests, then to the lower id."""

    def __init__(self, context: PolicyContext, options: JsqOptions) -> None:
        self._queue, self._affinity, self._latency = options.queue, options.affinity, context.latency

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if not isinstance(event, RequestArrived):
            return []
        replicas = view.with_role("mixed")
        if not replicas:
            raise ConfigError("jsq needs instances of role mixed: replicas that prefill and decode")
        if self._affinity and event.cached:
            own = {cached: self._work(event.request, cached) for cached in set(event.cached)}
            added = [own[cached] for cached in event.cached]
        else:
            added = [0.0] * len(view.instances)
        shortest = min(replicas, key=lambda i: (self._queue_length(view, i, added[i]), i))
        return [EnqueueRequest(event.request.id, (shortest,))]

    def _work(self, request: Request, cached: int) -> float:
        """Return the prefill work of a request that begins with so many cached tokens, in the queue's unit."""
        tokens = max(1, request.prompt_tokens - cached)
        return tokens if self._queue == "tokens" else self._latency.prefill_s(cached, tokens, GroupShape(1))

    def _queue_length(self, view: ClusterSnapshot, replica: int, added: float) -> tuple[float, int]:
        """Return (length in the chosen unit with `added` work, what decides between equal lengths)."""
        instance = view.instances[replica]
        if self._queue == "requests":
            return instance.running, instance.queued
        # idle replicas all count as 0, whenever they became free
        wait_s = max(0.0, instance.free_at_s - view.now_s)
        return added + (wait_s if self._queue == "seconds" else instance.queued), instance.running
