"""Requests in schedulers: their turn to enter, their stay, and how it ends."""

from __future__ import annotations

from collections.abc import Callable

from headway.control.backend import ActionImpossible
from headway.control.instance_queues import QueueEntry
from headway.control.queue_entries import SchedulerEntry
from headway.control.request import ControlledRequest
from headway.control.state import ControllerState
from headway.core.errors import RequestError
from headway.core.span import Phase
from headway.policy.placement.base import EnqueueRequest, SpanPaused, SpanProgress


class SchedulerResidency:
    def __init__(self, state: ControllerState, reject: Callable[[ControlledRequest, str], None]) -> None:
        """`reject` ends a request that a scheduler has refused."""
        self._state = state
        self._reject = reject

    def enqueue(self, action: EnqueueRequest) -> None:
        state = self._state
        journey = state.journey(action.request)
        group = state.group(action.group, journey)
        if journey.door is not None:
            raise ActionImpossible(f"{action.request} waits for its turn already")
        self.leave(journey, "moved")
        if not action.concurrent and any(state.lanes.blocked(i, action.request) for i in group):
            tokens, seconds = (1, 0.0) if action.phase == "decode" else state.hands.stay_s(journey.request, group)
            door = journey.door = SchedulerEntry(journey, group, action.phase, tokens, seconds)
            state.lanes.append(door)
            state.timeline.extend(door, state.now)
            state.count(group, tokens)
            state.touch(group)
            return
        self._enter(journey, group, action.phase)

    def through(self, door: SchedulerEntry) -> None:
        """A request's turn to enter has come."""
        journey = door.journey
        journey.door = None
        self._uncount(door)
        self._enter(journey, door.group, door.phase)

    def overtake(self, entry: QueueEntry) -> None:
        """Decodes that wait behind a span which has no room for its KV go before it, wherever they are: they have
        theirs, and give it back."""
        lanes = self._state.lanes
        behind = {other for lane in lanes.waiting for other in lane if entry < other}
        doors = sorted(other for other in behind if isinstance(other, SchedulerEntry) and other.phase == "decode")
        for door in reversed(doors):
            lanes.park(door)
            lanes.push(door)
            self._state.touch(door.group)
        if doors:
            self._state.anew()

    def _uncount(self, door: SchedulerEntry) -> None:
        self._state.count(door.group, -door.tokens)
        self._state.touch(door.group)

    def _enter(self, journey: ControlledRequest, group: tuple[int, ...], phase: Phase) -> None:
        state = self._state
        try:
            state.hands.enter(journey, group, phase, state.now)
        except RequestError as error:
            self._reject(journey, str(error))
            return
        journey.staying, journey.group, journey.phase = True, group, phase
        journey.kv_at.clear()
        for i in group:
            state.load[i] += 1
        state.touch(group)

    def preempt(self, journey: ControlledRequest) -> None:
        """Pause a decode."""
        self.leave(journey, "moved")
        at = SpanProgress(journey.request.prompt_tokens + journey.tokens, 0)
        self._state.news.append(SpanPaused(journey.request.id, len(journey.entries) - 1, at))

    def leave(self, journey: ControlledRequest, why: str) -> None:
        """Take a request out of its scheduler, if it is in one, with the tokens that it has."""
        if journey.staying:
            journey.tokens = self._state.hands.leave(journey, why, self._state.now)
            self.over(journey)

    def over(self, journey: ControlledRequest) -> None:
        """A stay has ended."""
        journey.staying = False
        for i in journey.group:
            self._state.load[i] -= 1
        self._state.touch(journey.group)

    def withdraw(self, journey: ControlledRequest) -> None:
        """A request waits for its turn no longer."""
        door = journey.door
        if door is not None:
            self._state.lanes.park(door)
            self._uncount(door)
            journey.door = None
            self._state.anew()
