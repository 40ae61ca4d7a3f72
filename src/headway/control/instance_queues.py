"""Whose turn it is on which instance: one order for all, so that groups can neither deadlock nor overtake.

Every entry (a span, a hold, or a request on its way to a scheduler) has a rank, and waits in the lane of every instance
of its group, in order of rank. It may begin when it is first in all of its lanes at once. Because the order is the same
everywhere, whatever waits waits for lower ranks or for something that runs and will end: waiting cannot go in circles.
Instances are acquired in order of (node, id), all in one step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

from headway.core.errors import InvariantError

Kind = Literal["span", "hold", "door"]
State = Literal["waiting", "running", "parked", "done"]


class QueueEntry:
    """Something that takes its turn. `owner`: the request's id, or the holder's. `after`: what must be done first.
    `planned_s`: when it is expected to end (`Timeline`)."""

    __slots__ = ("after", "beside", "group", "kind", "owner", "planned_s", "rank", "state")

    def __init__(
        self,
        kind: Kind,
        owner: str,
        group: tuple[int, ...],
        after: QueueEntry | None = None,
        beside: bool = False,
    ) -> None:
        self.kind, self.owner, self.group = kind, owner, group
        self.after, self.beside = after, beside
        self.rank = 0
        self.state: State = "parked"
        self.planned_s = 0.0

    def __lt__(self, other: QueueEntry) -> bool:
        return self.rank < other.rank

    def left_s(self, layers: int) -> float:
        """Predicted seconds from its start on."""
        return 0.0


class InstanceQueues:
    """One lane an instance. Nothing here knows time."""

    def __init__(self, nodes: Iterable[int]) -> None:
        """`nodes`: the node of each instance, by id."""
        self.nodes = list(nodes)
        self.waiting: list[list[QueueEntry]] = [[] for _ in self.nodes]
        self.running: list[QueueEntry | None] = [None] * len(self.nodes)
        self.holder: list[str | None] = [None] * len(self.nodes)
        self._last = 0
        self._first = 0

    def join(self, node: int) -> None:
        """One more instance, with the next id."""
        self.nodes.append(node)
        self.waiting.append([])
        self.running.append(None)
        self.holder.append(None)

    def ordered(self, group: Iterable[int]) -> tuple[int, ...]:
        """The order of acquisition."""
        return tuple(sorted(set(group), key=lambda i: (self.nodes[i], i)))

    def append(self, entry: QueueEntry) -> None:
        """Behind everything."""
        self._last += 1
        self._enter(entry, self._last)

    def push(self, entry: QueueEntry) -> None:
        """Before everything that waits (a resumed span)."""
        self._first -= 1
        self._enter(entry, self._first)

    def _enter(self, entry: QueueEntry, rank: int) -> None:
        entry.rank, entry.state = rank, "waiting"
        for i in entry.group:
            lane = self.waiting[i]
            if not lane or lane[-1].rank < rank:
                lane.append(entry)
            else:
                insort(lane, entry)

    def blocked(self, instance: int, owner: str) -> bool:
        """Whether a request that comes now has to wait its turn: others' spans run or wait there, or it is held."""
        run = self.running[instance]
        if run is not None and not run.beside:
            return True
        if self.holder[instance] not in (None, owner):
            return True
        return any(not entry.beside and entry.kind != "door" for entry in self.waiting[instance])

    def empty(self, instance: int) -> bool:
        """Whether nobody holds it, runs on it or waits for it."""
        return self.holder[instance] is None and self.running[instance] is None and not self.waiting[instance]

    def first(self, instance: int) -> QueueEntry | None:
        """Who is next there: the holder's own first entry where it is held."""
        holder = self.holder[instance]
        if holder is None:
            lane = self.waiting[instance]
            return lane[0] if lane else None
        return next((entry for entry in self.waiting[instance] if entry.owner == holder), None)

    def ready(self, entry: QueueEntry) -> bool:
        """Whether it is an entry's turn on all of its instances at once. Spans need instances on which no span runs;
        doors need that nothing exclusive runs."""
        if entry.after is not None and entry.after.state != "done":
            return False
        for i in entry.group:
            if self.first(i) is not entry:
                return False
            run = self.running[i]
            if run is not None and not (entry.kind == "door" and run.beside):
                return False
        return True

    def candidates(self, instances: Iterable[int]) -> list[QueueEntry]:
        """First entries of these lanes, in order of rank, each once."""
        found = {id(entry): entry for i in instances if (entry := self.first(i)) is not None}
        return sorted(found.values())

    def start(self, entry: QueueEntry) -> None:
        """Take an entry off its lanes: a span runs, a hold holds, a door is gone through."""
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
        """A running span has ended."""
        self._stop(entry)
        entry.state = "done"

    def park(self, entry: QueueEntry) -> None:
        """Off the lanes, to be pushed or appended again, or forgotten."""
        if entry.state == "running":
            self._stop(entry)
        elif entry.state == "waiting":
            self._leave(entry)
        entry.state = "parked"

    def release(self, holder: str, group: Iterable[int] = ()) -> tuple[int, ...]:
        """Instances that were held and are no longer. Holds that wait are withdrawn when no group is named."""
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
        """Raise InvariantError unless lanes are in order, each span runs on all of its group, and nobody runs where
        somebody else holds."""
        for i, lane in enumerate(self.waiting):
            if any(a.rank >= b.rank for a, b in pairwise(lane)):
                raise InvariantError(f"lane {i} is out of order")
            if any(entry.state != "waiting" or i not in entry.group for entry in lane):
                raise InvariantError(f"lane {i} has an entry that does not wait there")
            run = self.running[i]
            if run is not None:
                if any(self.running[j] is not run for j in run.group):
                    raise InvariantError(f"{run.owner} runs on part of its group")
                if self.holder[i] not in (None, run.owner):
                    raise InvariantError(f"{run.owner} runs on instance {i}, which {self.holder[i]} holds")
