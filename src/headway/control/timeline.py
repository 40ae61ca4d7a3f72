"""When instances will be free: all that waits in their lanes, laid out on an absolute time line as predicted to run.

Spans and requests on their way to a scheduler are laid out in order of rank, behind what schedulers have to prefill.

Extended by each commit; laid out anew when something took longer or shorter than predicted, or left its place, so that
predictions never drift (with 30% noise, plans on a time line that is not anchored do worse than a fixed ring).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headway.control.instance_queues import InstanceQueues, QueueEntry

CLOSE_S = 1e-9


class FreeTimes:
    """`free_s[i]`: when all that is committed to instance i is expected to have ended."""

    def __init__(self, lanes: InstanceQueues, layers: int, busy_s: Callable[[QueueEntry], float]) -> None:
        """`layers` of the model; `busy_s`: when what else computes on an entry's instances is expected to have ended,
        if it waits for that."""
        self._lanes = lanes
        self._layers = layers
        self._busy_s = busy_s
        self.free_s = [0.0] * len(lanes.nodes)

    def extend(self, entry: QueueEntry, now: float) -> None:
        """A span, or a request on its way to a scheduler, was appended behind everything."""
        start = max(self._busy_s(entry), *(self.free_s[i] for i in entry.group))
        start = max(start, now, entry.after.planned_s if entry.after is not None else now)
        entry.planned_s = start + entry.left_s(self._layers)
        for i in entry.group:
            self.free_s[i] = entry.planned_s

    def started(self, entry: QueueEntry, now: float) -> bool:
        """A span begins; True when that was not when it was expected to, so that the rest must be laid out anew."""
        end_s = now + entry.left_s(self._layers)
        late = abs(end_s - entry.planned_s) > CLOSE_S
        entry.planned_s = end_s
        return late

    def finished(self, entry: QueueEntry, now: float) -> bool:
        """A span has ended; as `started`."""
        late = abs(now - entry.planned_s) > CLOSE_S
        entry.planned_s = now
        return late

    def anew(self, now: float) -> Iterable[int]:
        """Lay out everything; instances whose time has changed."""
        lanes = self._lanes
        free = [now] * len(self.free_s)
        running = {id(run): run for run in lanes.running if run is not None}
        for run in running.values():
            run.planned_s = max(run.planned_s, now)
            for i in run.group:
                free[i] = run.planned_s
        waiting = {id(entry): entry for lane in lanes.waiting for entry in lane if entry.kind != "hold"}
        busy: dict[tuple[tuple[int, ...], bool], float] = {}
        for entry in sorted(waiting.values()):
            key = entry.group, entry.beside
            start = busy.get(key, -1.0)
            if start < 0.0:
                start = busy[key] = self._busy_s(entry)
            for i in entry.group:
                if free[i] > start:
                    start = free[i]
            if entry.after is not None and entry.after.state != "done":
                start = max(start, entry.after.planned_s)
            entry.planned_s = start + entry.left_s(self._layers)
            for i in entry.group:
                free[i] = entry.planned_s
        changed = [i for i, (old, new) in enumerate(zip(self.free_s, free, strict=True)) if max(old, now) != new]
        self.free_s = free
        return changed
