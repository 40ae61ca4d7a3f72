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


class SequenceParallelGroup:
    """A long request on its replicas. edge_s: predicted time between two places where its prefill
    can be paused, at most. busy: replicas on which short
    requests are. computed_s, suspended_s: so far. began_s: when it began to compute, or to decode, last; since_s: when
    it was paused last."""

    __slots__ = ("began_s", "busy", "computed_s", "decoding", "edge_s", "group", "order", "request", "since_s",
                 "state", "suspended_s")  # fmt: skip

    def __init__(self, request: Request, group: tuple[int, ...], order: int, edge_s: float = 0.0) -> None:
        self.request, self.group, self.order, self.edge_s = request, group, order, edge_s
        self.state: State = "drain"
        self.decoding = False
        self.busy = 0
        self.began_s = self.since_s = self.computed_s = self.suspended_s = 0.0

    @property
    def computes(self) -> bool:
        """Whether it does at this moment, and has not been asked to pause."""
        return self.state == ("decode" if self.decoding else "prefill")


class AgeingPolicy:
    """Ageing: a ring may be preempted while it has been suspended for at most `ageing` times as long as it has
    computed, and then waits for `slice_s` times `ageing` more at most. So it is suspended, in all, for little more than
    `ageing` times its own length, and short requests wait for little more than a slice. None: no bound (the paper)."""

    def __init__(self, ageing: float | None, slice_s: float) -> None:
        self._ageing, self._slice_s = ageing, slice_s

    def from_s(self, ring: SequenceParallelGroup) -> float:
        """When a ring that computes may be preempted again."""
        if self._ageing is None or not ring.suspended_s:
            return ring.began_s
        if not self._ageing:
            return float("inf")
        return max(ring.began_s, ring.began_s + ring.suspended_s / self._ageing - ring.computed_s)

    def until_s(self, ring: SequenceParallelGroup) -> float:
        """How long a paused ring waits for short requests."""
        if self._ageing is None:
            return float("inf")
        return ring.since_s + self._ageing * (ring.computed_s + self._slice_s) - ring.suspended_s


class PreemptionCandidates:
    """Rings that compute. Of those that may be preempted the youngest is asked first, so that the oldest come to their
    end. What begins at this very instant cannot be paused yet."""

    def __init__(self, patience: AgeingPolicy) -> None:
        self._patience = patience
        self._later: list[tuple[float, int, float, SequenceParallelGroup]] = []
        self._ready: list[tuple[int, float, SequenceParallelGroup]] = []

    def add(self, ring: SequenceParallelGroup) -> None:
        """It computes, from `began_s` on."""
        heappush(self._later, (self._patience.from_s(ring), ring.order, ring.began_s, ring))

    def first(self, now: float) -> SequenceParallelGroup | None:
        """The youngest that may be preempted; it stays among them."""
        later, ready = self._later, self._ready
        while later and later[0][0] < now:
            _, order, began_s, ring = heappop(later)
            heappush(ready, (-order, -began_s, ring))
        while ready:
            _, began_s, ring = ready[0]
            if ring.computes and ring.began_s == -began_s:
                return ring
            heappop(ready)
        return None

    def take(self, now: float) -> SequenceParallelGroup | None:
        """The same, and it is no longer among them."""
        ring = self.first(now)
        if ring is not None:
            heappop(self._ready)
        return ring

    def next_s(self) -> float | None:
        """When the next one may be preempted; None when none will."""
        later = self._later
        while later:
            at_s, _, began_s, ring = later[0]
            if ring.computes and ring.began_s == began_s:
                return at_s if at_s < float("inf") else None
            heappop(later)
        return None


class AgeingQueue:
    """When paused rings have waited for as long as they may."""

    def __init__(self, patience: AgeingPolicy) -> None:
        self._patience = patience
        self._heap: list[tuple[float, int, float, SequenceParallelGroup]] = []

    def add(self, ring: SequenceParallelGroup) -> None:
        """It has been paused at `since_s`."""
        due_s = self._patience.until_s(ring)
        if due_s < float("inf"):
            heappush(self._heap, (due_s, ring.order, ring.since_s, ring))

    def next_s(self) -> float | None:
        """The earliest; None when there is none."""
        heap = self._heap
        while heap:
            due_s, _, since_s, ring = heap[0]
            if ring.state == "paused" and ring.since_s == since_s:
                return due_s
            heappop(heap)
        return None

    def due(self, now: float) -> list[SequenceParallelGroup]:
        """Those whose time has come; they are closed by the caller."""
        found = []
        while (due_s := self.next_s()) is not None and due_s <= now:
            found.append(heappop(self._heap)[3])
        return found
