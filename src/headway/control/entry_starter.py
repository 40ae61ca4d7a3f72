"""Start of queue entries whose turn has come: spans, requests that enter a scheduler, reservations."""

from __future__ import annotations

from headway.control.group_reservations import GroupReservations
from headway.control.instance_queues import QueueEntry
from headway.control.queue_entries import SchedulerEntry, SpanEntry
from headway.control.residency import SchedulerResidency
from headway.control.span_dispatcher import SpanDispatcher
from headway.control.state import ControllerState


class EntryStarter:
    """Scan of the queues that have changed."""

    def __init__(
        self,
        state: ControllerState,
        dispatcher: SpanDispatcher,
        residency: SchedulerResidency,
        reservations: GroupReservations,
    ) -> None:
        self._state, self._dispatcher = state, dispatcher
        self._residency, self._reservations = residency, reservations

    def start_ready(self) -> bool:
        """Start the entries whose turn it is, in order of rank; return whether any was started."""
        state, queues, started = self._state, self._state.queues, False
        while state.touched:
            # only queues with a change can have a new ready entry; each start touches its group again
            touched, state.touched = state.touched, set()
            for entry in self._candidates(touched):
                if entry.state == "waiting" and queues.ready(entry) and self._schedulers_allow(entry):
                    # KV is short: decodes behind the span go first, because only their end frees blocks. The span
                    # is tried again when something changes on its group.
                    if isinstance(entry, SpanEntry) and not entry.concurrent and not state.backend.fits(entry):
                        self._residency.overtake(entry)
                        continue
                    queues.start(entry)
                    state.touch(entry.group)
                    if isinstance(entry, SpanEntry):
                        self._dispatcher.begin(entry)
                    elif isinstance(entry, SchedulerEntry):
                        self._residency.admit(entry)
                    else:
                        self._reservations.granted(entry)
                    started = True
        return started

    def _candidates(self, touched: set[int]) -> list[QueueEntry]:
        """Return what may begin now that these instances have changed, by rank."""
        found = self._state.queues.candidates(sorted(touched))
        # A prompt's first span waits for KV room on the instances of its later ones too.
        for entry in list(found):
            if isinstance(entry, SpanEntry) and entry.index:
                found.append(entry.controlled.entries[0])
        return sorted({id(entry): entry for entry in found}.values())

    def _schedulers_allow(self, entry: QueueEntry) -> bool:
        """Return whether schedulers let an entry begin: spans and reservations wait until the schedulers of their
        instances are empty, unless they are concurrent."""
        return entry.kind == "scheduler" or entry.concurrent or not any(self._state.residents[i] for i in entry.group)
