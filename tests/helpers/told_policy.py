"""A placement policy that only listens."""

from __future__ import annotations

from collections.abc import Sequence

from headway.policy.placement.contract import Action, ClusterSnapshot, Event


class Told:
    """A policy that records events and returns no actions; tests act through `ClusterController.do`."""

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        self.heard.append(event)
        return ()

    def next_wakeup(self, now: float) -> float | None:
        return None

    def last(self, kind: type) -> Event:
        return next(event for event in reversed(self.heard) if isinstance(event, kind))
