"""Reservations of groups of instances for one holder: granted whole, released in parts or whole."""

from __future__ import annotations

from collections.abc import Iterable

from headway.control.backend import ActionImpossible
from headway.control.instance_queues import QueueEntry
from headway.control.state import ControllerState
from headway.policy.placement.base import ActionRefused, HoldGranted, HoldGroup, ReleaseGroup


class GroupReservations:
    """Reservations, waiting and granted. `InstanceQueues.holder` has the granted ones, by instance."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        # queue entries of each holder that are not granted
        self._waiting: dict[str, list[QueueEntry]] = {}

    def hold(self, action: HoldGroup) -> None:
        """Queue a reservation. Raises ActionImpossible."""
        state = self._state
        # its request has ended, before the policy could know: no event would ever release the reservation
        if action.holder in state.leaving:
            raise ActionImpossible(f"there is no request {action.holder}")
        group = state.group(action.group)
        if any(holder == action.holder for holder in state.lanes.holder):
            # hold and wait could deadlock with another holder: a holder extends only by instances that are free now
            taken = [i for i in group if not state.lanes.empty(i)]
            if taken:
                raise ActionImpossible(f"{action.holder} holds a group already, and instance {taken[0]} is not free")
        entry = QueueEntry("hold", action.holder, group)
        self._waiting.setdefault(action.holder, []).append(entry)
        state.lanes.append(entry)
        state.touch(group)

    def release(self, action: ReleaseGroup) -> None:
        """Release the named instances; none named: all, and withdraw what the holder waits for."""
        if not action.group:
            self.withdraw(action.holder)
        self.let_go(action.holder, action.group)

    def withdraw(self, holder: str) -> None:
        """Withdraw a holder's waiting reservations."""
        for entry in self._waiting.pop(holder, ()):
            self._state.lanes.park(entry)
            self._state.touch(entry.group)

    def let_go(self, holder: str, group: Iterable[int] = ()) -> None:
        """Release these instances of a holder; none named: all."""
        freed = self._state.lanes.release(holder, group)
        if freed:
            self._state.hands.released(holder, freed, self._state.now)
            self._state.touch(freed)

    def granted(self, entry: QueueEntry) -> None:
        """Report a reservation whose turn has come; `InstanceQueues.start` has set the holder."""
        self._waits_no_longer(entry)
        self._state.hands.held(entry.owner, entry.group, self._state.now)
        self._state.news.append(HoldGranted(entry.owner, entry.group))

    def lose(self, instance: int) -> None:
        """End reservations that involve a lost instance: it is released, waiting groups with it are refused. Requests
        with reservations there have been dropped before: left are reservations under other names."""
        state = self._state
        for entry in [e for e in state.lanes.waiting[instance] if e.kind == "hold"]:
            state.lanes.park(entry)
            self._waits_no_longer(entry)
            state.touch(entry.group)
            state.news.append(ActionRefused(entry.owner, "hold", f"instance {instance} is gone"))
        holder = state.lanes.holder[instance]
        if holder is not None:
            self.let_go(holder, (instance,))

    def _waits_no_longer(self, entry: QueueEntry) -> None:
        others = [other for other in self._waiting.pop(entry.owner) if other is not entry]
        if others:
            self._waiting[entry.owner] = others
