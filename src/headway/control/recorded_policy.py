"""A placement policy that decides as a log says: for replays that show a run and do not check it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headway.control.replay import ReplayResult
from headway.core.request import Request
from headway.policy.placement import base
from headway.policy.placement.base import Action, Event
from headway.policy.placement.view import ClusterSnapshot

_ACTIONS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        base.CommitSpans,
        base.EnqueueRequest,
        base.HoldGroup,
        base.PreemptRequest,
        base.RejectRequest,
        base.ReleaseGroup,
        base.ResumeRequest,
        base.TransferKv,
    )
}


class RecordedPolicy:
    """The `PlacementPolicy` of a replay whose decisions are the recorded ones."""

    def __init__(self, replay: ReplayResult) -> None:
        self._replay = replay
        # Requests as their arrivals had them: actions name them only.
        self._requests: dict[str, Request] = {}

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """Return the recorded actions; none after the log's end."""
        if isinstance(event, base.RequestArrived):
            self._requests[event.request.id] = event.request
        try:
            decided = self._replay.next_decision()
        except IndexError:
            return ()
        actions = [self._action(*each) for each in decided[1]]
        if isinstance(event, base.RequestFinished | base.RequestDropped):
            self._requests.pop(event.request, None)
        return actions

    def next_wakeup(self, now: float) -> float | None:
        """Return the recorded time."""
        try:
            at_s = self._replay.next_decision()
        except IndexError:
            return None
        return None if at_s is None else float(at_s)

    def _action(self, name: str, fields: dict[str, Any]) -> Action:
        """Return an action that was logged by `decision_log.plain`."""
        filled = dict(fields)
        for key in ("spans", "batched_with"):
            if key in filled:
                named = [{**span, "request": self._requests[span["request"]]} for span in filled[key]]
                filled[key] = msgspec.to_builtins(named)
        action: Action = msgspec.convert(filled, _ACTIONS[name])
        return action
