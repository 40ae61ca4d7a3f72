"""Long requests and the replicas that they hold: what state each is in, and which one is asked to step aside.

drain      committed; the short prefills that are on its replicas end first, no more are sent there
prefill    computes; may be preempted
pausing    asked to pause; short prefills may be sent to its replicas already
paused     its state is kept, short prefills run in its place
closing    paused for as long as it may be: no more short prefills, and it goes on when those that are there have ended
decode     decodes on its replicas; may be preempted only without co-location
ended      has left its replicas
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Literal

from headway.core.request import Request

State = Literal["drain", "prefill", "pausing", "paused", "closing", "decode", "ended"]


class Ring:
    """A long request on its replicas. busy: replicas on which short prefills are. suspended_s: so far, of at most
    allowance_s (None: no bound). began_s: when it began to compute, or to decode, last."""

    __slots__ = ("allowance_s", "began_s", "busy", "decoding", "group", "order", "request", "since_s", "state",
                 "suspended_s")  # fmt: skip

    def __init__(self, request: Request, group: tuple[int, ...], order: int, allowance_s: float | None) -> None:
        self.request, self.group, self.order = request, group, order
        self.allowance_s = allowance_s
        self.state: State = "drain"
        self.decoding = False
        self.busy = 0
        self.began_s = self.since_s = self.suspended_s = 0.0

    @property
    def shielded(self) -> bool:
        """Whether it has been suspended for as long as it may be."""
        return self.allowance_s is not None and self.suspended_s >= self.allowance_s


class Victims:
    """Rings that may be preempted; the youngest is asked first, so that the oldest come to their end. `fresh`: the last
    question found one that began at that very instant, and cannot be paused yet."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Ring]] = []
        self.fresh = False

    def add(self, ring: Ring) -> None:
        """It computes."""
        if not ring.shielded:
            heappush(self._heap, (-ring.order, ring))

    def take(self, now: float) -> Ring | None:
        """The youngest that has begun before `now`."""
        fresh: list[tuple[int, Ring]] = []
        found = None
        while self._heap and found is None:
            entry = heappop(self._heap)
            ring = entry[1]
            if ring.state != ("decode" if ring.decoding else "prefill"):
                continue
            if ring.began_s < now:
                found = ring
            else:
                fresh.append(entry)
        for entry in fresh:
            heappush(self._heap, entry)
        self.fresh = bool(fresh)
        return found


class Deadlines:
    """When paused rings have waited for as long as they may."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ring]] = []

    def add(self, ring: Ring) -> None:
        """It has been paused at `since_s`."""
        if ring.allowance_s is not None:
            heappush(self._heap, (ring.since_s + ring.allowance_s - ring.suspended_s, ring.order, ring))

    def next_s(self) -> float | None:
        """The earliest; None when there is none."""
        heap = self._heap
        while heap:
            due_s, _, ring = heap[0]
            if ring.state == "paused" and ring.since_s + (ring.allowance_s or 0.0) - ring.suspended_s == due_s:
                return due_s
            heappop(heap)
        return None

    def due(self, now: float) -> list[Ring]:
        """Those whose time has come; they are closed by the caller."""
        found = []
        while (due_s := self.next_s()) is not None and due_s <= now:
            found.append(heappop(self._heap)[2])
        return found
