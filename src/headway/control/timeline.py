"""Predicted times at which instances will be free, from an absolute time line of all entries in their queues.

Spans and requests on their way to a scheduler are laid out in order of rank, behind what schedulers have to prefill.

Each commit extends the time line. It is laid out again when an entry took longer or shorter than predicted, or left its
place, so that predictions never drift (with 30% noise, plans on a time line that is not anchored do worse than a fixed
ring).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headway.control.instance_queues import InstanceQueues, QueueEntry

# seconds; differences below are rounding, not wrong predictions
CLOSE_S = 1e-9


class FreeTimes:
    """Predicted end of each entry (`QueueEntry.planned_s`) and of all entries of each instance (`free_s`)."""

    def __init__(self, queues: InstanceQueues, layers: int, busy_s: Callable[[QueueEntry], float]) -> None:
        """layers: of the model. busy_s: absolute time, in seconds, at which prefills in the schedulers of an entry's
        instances are expected to have ended; 0.0 for an entry that does not wait for them."""
        self._queues = queues
        self._layers = layers
        self._busy_s = busy_s
        # absolute seconds, by instance; in the past: free
        self.free_s = [0.0] * len(queues.nodes)

    def extend(self, entry: QueueEntry, now: float) -> None:
        """Lay out an entry that was appended behind all others: O(group), the usual case."""
        # a group computes in lockstep: it begins when the last of its instances is free
        start = max(self._busy_s(entry), *(self.free_s[i] for i in entry.group))
        start = max(start, now, entry.ready_s, entry.after.planned_s if entry.after is not None else now)
        entry.planned_s = start + entry.remaining_s(self._layers)
        for i in entry.group:
            self.free_s[i] = entry.planned_s

    def started(self, entry: QueueEntry, now: float) -> bool:
        """Set the predicted end of a span that begins now. Return whether it differs from the planned one, so that the
        entries behind it must be laid out again."""
        end_s = now + entry.remaining_s(self._layers)
        late = abs(end_s - entry.planned_s) > CLOSE_S
        entry.planned_s = end_s
        return late

    def finished(self, entry: QueueEntry, now: float) -> bool:
        """Set the end of a span that ends now. Return as `started` does."""
        late = abs(now - entry.planned_s) > CLOSE_S
        entry.planned_s = now
        return late

    def relayout(self, now: float) -> Iterable[int]:
        """Lay out all entries again, and return the instances whose free time has changed. O(entries log entries)."""
        queues = self._queues
        free = [now] * len(self.free_s)
        running = {id(run): run for run in queues.running if run is not None}
        for run in running.values():
            # an overdue span is expected to end at any moment
            run.planned_s = max(run.planned_s, now)
            for i in run.group:
                free[i] = run.planned_s
        # reservations have no predicted length
        waiting = {id(entry): entry for queue in queues.waiting for entry in queue if entry.kind != "hold"}
        # the backend's answer by (group, concurrent): the same for all entries of one layout
        busy: dict[tuple[tuple[int, ...], bool], float] = {}
        # by rank: all entries that an entry can wait for have been laid out before it
        for entry in sorted(waiting.values()):
            key = entry.group, entry.concurrent
            start = busy.get(key, -1.0)
            if start < 0.0:
                start = busy[key] = self._busy_s(entry)
            for i in entry.group:
                if free[i] > start:
                    start = free[i]
            if entry.ready_s > start:
                start = entry.ready_s
            if entry.after is not None and entry.after.state != "done":
                start = max(start, entry.after.planned_s)
            entry.planned_s = start + entry.remaining_s(self._layers)
            for i in entry.group:
                free[i] = entry.planned_s
        # a free time in the past means the same as now
        changed = [i for i, (old, new) in enumerate(zip(self.free_s, free, strict=True)) if max(old, now) != new]
        self.free_s = free
        return changed
