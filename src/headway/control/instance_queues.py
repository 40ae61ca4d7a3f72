"""Queues of the instances: one total order for all, so that groups can neither deadlock nor overtake each other.

Every entry (a span, a reservation, or a request on its way to a scheduler) has a rank, and waits in the queue of every
instance of its group, in order of rank. It may begin when it is first in all of its queues at once. Because the order
is the same on all instances, an entry waits only for lower ranks or for a running span that will end: waits form no
cycle. Instances are acquired in order of (node, id), all in one step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

from headway.core.errors import InvariantError

Kind = Literal["span", "hold", "scheduler"]
State = Literal["waiting", "running", "unqueued", "done"]


class QueueEntry:
    """An entry in the queues of a group of instances."""

    __slots__ = ("after", "concurrent", "group", "kind", "owner", "planned_s", "rank", "ready_s", "state")

    def __init__(
        self,
        kind: Kind,
        owner: str,
        group: tuple[int, ...],
        after: QueueEntry | None = None,
        concurrent: bool = False,
    ) -> None:
        # kind: "span", "hold" (reservation) or "scheduler" (request on its way to a scheduler). owner: id of the
        # request, or the reservation's holder. group: in order of acquisition.
        self.kind, self.owner, self.group = kind, owner, group
        # after: entry that must be done first, the request's previous span. beside: runs concurrently with
        # requests in schedulers
        self.after, self.concurrent = after, concurrent
        # place in the total order; set when the entry is queued
        self.rank = 0
        self.state: State = "unqueued"
        # absolute time from which on it may compute: when the cached KV before it has been copied to its group
        self.ready_s = 0.0
        # predicted absolute time of its end, in seconds (`FreeTimes`)
        self.planned_s = 0.0

    def __lt__(self, other: QueueEntry) -> bool:
        return self.rank < other.rank

    def remaining_s(self, layers: int) -> float:
        """Return the predicted seconds from its (next) start to its end; `layers`: of the model."""
        return 0.0


class InstanceQueues:
    """The queue, the running span and the reservation of each instance. Independent of time."""

    def __init__(self, nodes: Iterable[int]) -> None:
        """`nodes`: the node of each instance, by id."""
        self.nodes = list(nodes)
        # waiting entries of each instance, by rank
        self.waiting: list[list[QueueEntry]] = [[] for _ in self.nodes]
        # the span that computes on each instance
        self.running: list[QueueEntry | None] = [None] * len(self.nodes)
        # the holder that each instance is reserved for
        self.holder: list[str | None] = [None] * len(self.nodes)
        # highest and lowest rank given so far: appended entries count up, pushed ones count down from 0
        self._last = 0
        self._first = 0

    def join(self, node: int) -> None:
        """Add an instance, with the next id, on a node."""
        self.nodes.append(node)
        self.waiting.append([])
        self.running.append(None)
        self.holder.append(None)

    def ordered(self, group: Iterable[int]) -> tuple[int, ...]:
        """Return a group without repetitions, in the order of acquisition: by (node, id)."""
        return tuple(sorted(set(group), key=lambda i: (self.nodes[i], i)))

    def append(self, entry: QueueEntry) -> None:
        """Queue an entry behind all others."""
        self._last += 1
        self._enter(entry, self._last)

    def push(self, entry: QueueEntry) -> None:
        """Queue an entry before all that wait: a resumed span, or a decode that overtakes one without room."""
        self._first -= 1
        self._enter(entry, self._first)

    def _enter(self, entry: QueueEntry, rank: int) -> None:
        entry.rank, entry.state = rank, "waiting"
        for i in entry.group:
            queue = self.waiting[i]
            # the usual case, an appended entry, needs no search
            if not queue or queue[-1].rank < rank:
                queue.append(entry)
            else:
                insort(queue, entry)

    def blocked(self, instance: int, owner: str) -> bool:
        """Return whether a request that comes now must queue for its scheduler: exclusive spans run or wait on the
        instance, a reservation waits, or another holder has it."""
        run = self.running[instance]
        if run is not None and not run.concurrent:
            return True
        if self.holder[instance] not in (None, owner):
            return True
        return any(not entry.concurrent and entry.kind != "scheduler" for entry in self.waiting[instance])

    def empty(self, instance: int) -> bool:
        """Return whether an instance has no reservation, no running span and no waiting entry."""
        return self.holder[instance] is None and self.running[instance] is None and not self.waiting[instance]

    def first(self, instance: int) -> QueueEntry | None:
        """Return the next entry of an instance; where it is reserved, the holder's first one. None: there is none."""
        holder = self.holder[instance]
        if holder is None:
            queue = self.waiting[instance]
            return queue[0] if queue else None
        return next((entry for entry in self.waiting[instance] if entry.owner == holder), None)

    def ready(self, entry: QueueEntry) -> bool:
        """Return whether it is an entry's turn on all of its instances at once. Spans need instances without a running
        span; requests on their way to a scheduler need instances without an exclusive one."""
        if entry.after is not None and entry.after.state != "done":
            return False
        for i in entry.group:
            if self.first(i) is not entry:
                return False
            run = self.running[i]
            # a concurrent span computes together with the scheduler's requests, so that more of these may enter
            if run is not None and not (entry.kind == "scheduler" and run.concurrent):
                return False
        return True

    def candidates(self, instances: Iterable[int]) -> list[QueueEntry]:
        """Return the first entries of these instances' queues, by rank, each once."""
        # by identity: an entry is first in several queues of its group
        found = {id(entry): entry for i in instances if (entry := self.first(i)) is not None}
        return sorted(found.values())

    def start(self, entry: QueueEntry) -> None:
        """Take an entry out of its queues: a span runs from now on, a reservation is granted, a request may enter its
        scheduler. Raises InvariantError if it is not ready."""
        if not self.ready(entry):
            raise InvariantError(f"it is not the turn of {entry.owner}")
        self._leave(entry)
        if entry.kind == "span":
            for i in entry.group:
                self.running[i] = entry
            entry.state = "running"
        elif entry.kind == "hold":
            for i in entry.group:
                self.holder[i] = entry.owner
            entry.state = "done"
        else:
            entry.state = "done"

    def finish(self, entry: QueueEntry) -> None:
        """Mark a running span as complete; its group is free."""
        self._stop(entry)
        entry.state = "done"

    def unqueue(self, entry: QueueEntry) -> None:
        """Take an entry, waiting or running, off its instances, to be queued again or dropped."""
        if entry.state == "running":
            self._stop(entry)
        elif entry.state == "waiting":
            self._leave(entry)
        entry.state = "unqueued"

    def release(self, holder: str, group: Iterable[int] = ()) -> tuple[int, ...]:
        """End a holder's reservation of these instances (none named: all), and return those that it had. Waiting
        reservations are untouched (`GroupReservations.withdraw`)."""
        named = set(group)
        freed = []
        for i, at in enumerate(self.holder):
            if at == holder and (not named or i in named):
                self.holder[i] = None
                freed.append(i)
        return tuple(freed)

    def _stop(self, entry: QueueEntry) -> None:
        for i in entry.group:
            if self.running[i] is not entry:
                raise InvariantError(f"{entry.owner} does not run on instance {i}")
            self.running[i] = None

    def _leave(self, entry: QueueEntry) -> None:
        for i in entry.group:
            self.waiting[i].remove(entry)

    def check(self) -> None:
        """Raise InvariantError unless queues are in order, each span runs on all of its group, and none runs on an
        instance that is reserved for another holder. For tests."""
        for i, queue in enumerate(self.waiting):
            if any(a.rank >= b.rank for a, b in pairwise(queue)):
                raise InvariantError(f"the queue of instance {i} is out of order")
            if any(entry.state != "waiting" or i not in entry.group for entry in queue):
                raise InvariantError(f"the queue of instance {i} has an entry that does not wait there")
            run = self.running[i]
            if run is not None:
                if any(self.running[j] is not run for j in run.group):
                    raise InvariantError(f"{run.owner} runs on part of its group")
                if self.holder[i] not in (None, run.owner):
                    raise InvariantError(f"{run.owner} runs on instance {i}, which {self.holder[i]} holds")
