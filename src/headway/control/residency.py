"""Requests in schedulers: their turn to enter, their stay, and how it ends."""

from __future__ import annotations

from collections.abc import Callable

from headway.control.backend import Impossible
from headway.control.instance_queues import Entry
from headway.control.queue_entries import Door
from headway.control.request import Journey
from headway.control.state import State
from headway.core.errors import RequestError
from headway.core.span import Phase
from headway.policy.placement.base import Enqueue, Paused, Progress


class Stays:
    def __init__(self, state: State, drop: Callable[[Journey, str], None]) -> None:
        """`drop` ends a request that a scheduler has refused."""
        self._state = state
        self._drop = drop

    def enqueue(self, action: Enqueue) -> None:
        state = self._state
        journey = state.journey(action.request)
        group = state.group(action.group, journey)
        if journey.door is not None:
            raise Impossible(f"{action.request} waits for its turn already")
        self.leave(journey, "moved")
        if not action.beside and any(state.lanes.blocked(i, action.request) for i in group):
            tokens, seconds = (1, 0.0) if action.phase == "decode" else state.hands.stay_s(journey.request, group)
            door = journey.door = Door(journey, group, action.phase, tokens, seconds)
            state.lanes.append(door)
            state.timeline.extend(door, state.now)
            state.count(group, tokens)
            state.touch(group)
            return
        self._enter(journey, group, action.phase)

    def through(self, door: Door) -> None:
        """A request's turn to enter has come."""
        journey = door.journey
        journey.door = None
        self._uncount(door)
        self._enter(journey, door.group, door.phase)

    def overtake(self, entry: Entry) -> None:
        """Decodes that wait behind a span which has no room for its KV go before it, wherever they are: they have
        theirs, and give it back."""
        lanes = self._state.lanes
        behind = {other for lane in lanes.waiting for other in lane if entry < other}
        doors = sorted(other for other in behind if isinstance(other, Door) and other.phase == "decode")
        for door in reversed(doors):
            lanes.park(door)
            lanes.push(door)
            self._state.touch(door.group)
        if doors:
            self._state.anew()

    def _uncount(self, door: Door) -> None:
        self._state.count(door.group, -door.tokens)
        self._state.touch(door.group)

    def _enter(self, journey: Journey, group: tuple[int, ...], phase: Phase) -> None:
        state = self._state
        try:
            state.hands.enter(journey, group, phase, state.now)
        except RequestError as error:
            self._drop(journey, f"rejected: {error}")
            return
        journey.staying, journey.group, journey.phase = True, group, phase
        journey.kv_at.clear()
        for i in group:
            state.load[i] += 1
        state.touch(group)

    def preempt(self, journey: Journey) -> None:
        """Pause a decode."""
        self.leave(journey, "moved")
        at = Progress(journey.request.prompt_tokens + journey.tokens, 0)
        self._state.news.append(Paused(journey.request.id, len(journey.entries) - 1, at))

    def leave(self, journey: Journey, why: str) -> None:
        """Take a request out of its scheduler, if it is in one, with the tokens that it has."""
        if journey.staying:
            journey.tokens = self._state.hands.leave(journey, why, self._state.now)
            self.over(journey)

    def over(self, journey: Journey) -> None:
        """A stay has ended."""
        journey.staying = False
        for i in journey.group:
            self._state.load[i] -= 1
        self._state.touch(journey.group)

    def withdraw(self, journey: Journey) -> None:
        """A request waits for its turn no longer."""
        door = journey.door
        if door is not None:
            self._state.lanes.park(door)
            self._uncount(door)
            journey.door = None
            self._state.anew()
