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
        if action.holder in state.ending:
            raise ActionImpossible(f"there is no request {action.holder}")
        group = state.group(action.group)
        if any(holder == action.holder for holder in state.queues.holder):
            # hold and wait could deadlock with another holder: a holder extends only by instances that are free now
            taken = [i for i in group if not state.queues.empty(i)]
            if taken:
                raise ActionImpossible(f"{action.holder} holds a group already, and instance {taken[0]} is not free")
        entry = QueueEntry("hold", action.holder, group)
        self._waiting.setdefault(action.holder, []).append(entry)
        state.queues.append(entry)
        state.touch(group)

    def release(self, action: ReleaseGroup) -> None:
        """Release the named instances; none named: all, and withdraw what the holder waits for."""
        if not action.group:
            self.withdraw(action.holder)
        self.release_now(action.holder, action.group)

    def withdraw(self, holder: str) -> None:
        """Withdraw a holder's waiting reservations."""
        for entry in self._waiting.pop(holder, ()):
            self._state.queues.unqueue(entry)
            self._state.touch(entry.group)

    def release_now(self, holder: str, group: Iterable[int] = ()) -> None:
        """Release these instances of a holder; none named: all."""
        freed = self._state.queues.release(holder, group)
        if freed:
            self._state.backend.released(holder, freed, self._state.now)
            self._state.touch(freed)

    def granted(self, entry: QueueEntry) -> None:
        """Report a reservation whose turn has come; `InstanceQueues.start` has set the holder."""
        self._remove_waiting(entry)
        self._state.backend.held(entry.owner, entry.group, self._state.now)
        self._state.pending_events.append(HoldGranted(entry.owner, entry.group))

    def lose(self, instance: int) -> None:
        """End reservations that involve a lost instance: it is released, waiting groups with it are refused. Requests
        with reservations there have been dropped before: left are reservations under other names."""
        state = self._state
        for entry in [e for e in state.queues.waiting[instance] if e.kind == "hold"]:
            state.queues.unqueue(entry)
            self._remove_waiting(entry)
            state.touch(entry.group)
            state.pending_events.append(ActionRefused(entry.owner, "hold", f"instance {instance} is gone"))
        holder = state.queues.holder[instance]
        if holder is not None:
            self.release_now(holder, (instance,))

    def _remove_waiting(self, entry: QueueEntry) -> None:
        others = [other for other in self._waiting.pop(entry.owner) if other is not entry]
        if others:
            self._waiting[entry.owner] = others
