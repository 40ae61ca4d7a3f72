"""Requests in the schedulers of instances: queueing for entry, residency, and its end."""

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
    """Requests in schedulers or queued for one. A request is in one scheduler, or in one queue for entry, at most."""

    def __init__(self, state: ControllerState, reject: Callable[[ControlledRequest, str], None]) -> None:
        """`reject` ends a request that a scheduler has refused, with the reason."""
        self._state = state
        self._reject = reject

    def enqueue(self, action: EnqueueRequest) -> None:
        """Give a request to the scheduler of a group, now or when its turn comes behind spans."""
        state = self._state
        journey = state.journey(action.request)
        group = state.group(action.group, journey)
        if journey.door is not None:
            raise ActionImpossible(f"{action.request} waits for its turn already")
        # from another scheduler it takes its KV along
        self.leave(journey, "moved")
        if not action.concurrent and any(state.lanes.blocked(i, action.request) for i in group):
            # a decode has no prompt tokens left to compute: it counts as one, and delays no span
            tokens, seconds = (1, 0.0) if action.phase == "decode" else state.hands.stay_s(journey.request, group)
            door = journey.door = SchedulerEntry(journey, group, action.phase, tokens, seconds)
            state.lanes.append(door)
            state.timeline.extend(door, state.now)
            state.count(group, tokens)
            state.touch(group)
            return
        self._enter(journey, group, action.phase)

    def through(self, door: SchedulerEntry) -> None:
        """Let a request whose turn has come enter its scheduler."""
        journey = door.journey
        journey.door = None
        self._uncount(door)
        self._enter(journey, door.group, door.phase)

    def overtake(self, entry: QueueEntry) -> None:
        """Move decodes that wait behind a span without enough free KV before it, on all instances: they have their KV
        already, and free it when they end."""
        lanes = self._state.lanes
        # on all instances, not only the span's: a decode's KV may lie where the span needs blocks
        behind = {other for lane in lanes.waiting for other in lane if entry < other}
        doors = sorted(other for other in behind if isinstance(other, SchedulerEntry) and other.phase == "decode")
        # `push` goes to the very front: in reverse, so that the decodes keep their order
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
        # only after the scheduler has accepted it
        journey.staying, journey.group, journey.phase = True, group, phase
        # from now on its KV is where it is resident; earlier copies no longer count as its places
        journey.kv_at.clear()
        for i in group:
            state.load[i] += 1
        state.touch(group)

    def preempt(self, journey: ControlledRequest) -> None:
        """Pause a decode: `SpanPaused` follows, and its KV is kept."""
        self.leave(journey, "moved")
        # a decode stops between iterations: all of its tokens are complete in all layers
        at = SpanProgress(journey.request.prompt_tokens + journey.tokens, 0)
        self._state.news.append(SpanPaused(journey.request.id, len(journey.entries) - 1, at))

    def leave(self, journey: ControlledRequest, why: str) -> None:
        """Take a request out of its scheduler, if it is in one, and keep the number of its output tokens. `why`: see
        `InstanceBackend.leave`."""
        if journey.staying:
            journey.tokens = self._state.hands.leave(journey, why, self._state.now)
            self.over(journey)

    def over(self, journey: ControlledRequest) -> None:
        """Record that a request is no longer in its scheduler. Its `group` remains: its KV may still be there."""
        journey.staying = False
        for i in journey.group:
            self._state.load[i] -= 1
        self._state.touch(journey.group)

    def withdraw(self, journey: ControlledRequest) -> None:
        """Take a request out of the queue for its scheduler, if it is in one."""
        door = journey.door
        if door is not None:
            self._state.lanes.park(door)
            self._uncount(door)
            journey.door = None
            self._state.anew()
