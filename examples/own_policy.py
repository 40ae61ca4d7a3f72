"""Policies of one's own: an order of waiting prefills, and a placement on the instances of a cluster.

headway simulate examples/chat-and-documents.yaml --set policy.policy=examples.own_policy.SmallestFirst
headway serve --scheduling-policy examples.own_policy.SmallestFirst
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.policy.iteration.ordering import PrefillFacts, UrgencyLine
from headway.policy.placement.contract import (
    Action,
    ClusterSnapshot,
    EnqueueRequest,
    Event,
    PlacementPolicy,
    RequestArrived,
)
from headway.policy.placement.registry import PolicyContext, PolicyOptions


class SmallestFirst:
    """The prompt with the least work in all goes first, however long it has waited."""

    name = "smallest-first"
    parallel = True

    def line(self, facts: PrefillFacts) -> UrgencyLine:
        """Return urgency(now) = total_s: constant in time, the smallest first."""
        return UrgencyLine(facts.total_s, 0.0)


class RoundRobinOptions(PolicyOptions):
    """Options of `RoundRobin`."""

    stride: int = 1
    """How many instances the next request is further on."""


class RoundRobin(PlacementPolicy):
    """Whole requests to the instances of role mixed, in turn."""

    Options = RoundRobinOptions

    def __init__(self, context: PolicyContext, options: RoundRobinOptions) -> None:
        self._stride = options.stride
        self._next = 0

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """Enqueue a request that has arrived; nothing else is decided here."""
        if not isinstance(event, RequestArrived):
            return []
        instances = sorted(view.with_role("mixed"))
        chosen = instances[self._next % len(instances)]
        self._next += self._stride
        return [EnqueueRequest(event.request.id, (chosen,))]
