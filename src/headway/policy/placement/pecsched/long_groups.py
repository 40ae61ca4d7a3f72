"""Long requests with their replicas: the state of each, and the order in which they are preempted and resumed.

States (`GroupState`):
drain      committed; short prefills on its replicas end first, and no more are sent there
prefill    computes; may be preempted
pausing    asked to pause; short prefills may already be sent to its replicas
paused     keeps its state while short prefills run on its replicas
closing    paused for as long as ageing allows: takes no more short prefills, and resumes when those there have ended
decode     decodes on its replicas; may be preempted only without co-location
ended      has left its replicas
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Literal

from headway.core.request import Request

GroupState = Literal["drain", "prefill", "pausing", "paused", "closing", "decode", "ended"]


class SequenceParallelGroup:
    """A long request with the replicas that compute it."""

    __slots__ = ("began_s", "busy", "computed_s", "decoding", "order", "pause_interval_s", "paused_at_s", "prefill_s",
                 "replicas", "request", "state", "suspended_s")  # fmt: skip

    def __init__(
        self,
        request: Request,
        replicas: tuple[int, ...],
        order: int,
        pause_interval_s: float = 0.0,
        prefill_s: float = 0.0,
    ) -> None:
        self.request, self.replicas = request, replicas
        self.order = order  # of commitment
        self.pause_interval_s = pause_interval_s  # longest predicted time between two pause points of its prefill
        self.prefill_s = prefill_s  # predicted time of its prefill alone
        self.state: GroupState = "drain"
        self.decoding = False
        self.busy = 0  # replicas with short requests
        self.began_s = 0.0  # when it last began to compute, or to decode
        self.paused_at_s = 0.0  # when it was paused last
        self.computed_s = self.suspended_s = 0.0  # so far

    @property
    def computes(self) -> bool:
        """Whether it computes now and has not been asked to pause."""
        return self.state == ("decode" if self.decoding else "prefill")

    def leaves_room(self, tokens: int, capacity: int) -> bool:
        """Return whether a short prompt's KV fits beside this prompt's on a replica that holds `capacity` tokens (0:
        any number). Else, with this one paused, the short one would wait for its KV, and this one for the short one."""
        share = -(-self.request.prompt_tokens // len(self.replicas))
        # a twentieth for blocks that are not full
        return not capacity or share + tokens <= 0.95 * capacity

    def spare_s(self, at_s: float) -> float:
        """Return how long its prefill may stand still from `at_s` on for the first token to meet the request's target;
        infinite without a target."""
        due_s = self.request.slo.ttft_s
        if due_s is None or self.decoding:
            return float("inf")
        return self.request.arrival_s + due_s - at_s - max(0.0, self.prefill_s - self.computed_s)


class AgeingPolicy:
    """Bound on the suspension of long requests.

    A group may be preempted while it has been suspended for at most `ageing` times as long as it has computed; it then
    waits for at most `ageing` × `slice_s` more. So its whole suspension is little more than `ageing` times its own
    length, and short requests wait for little more than a slice. A target for its first token bounds both further."""

    def __init__(self, ageing: float | None, slice_s: float) -> None:
        """ageing: None: no bound (the paper)."""
        self._ageing, self._slice_s = ageing, slice_s

    def preemptible_at_s(self, group: SequenceParallelGroup) -> float:
        """Return when a computing group may be preempted again."""
        if self._ageing is None:
            return group.began_s
        # no time to lose: how much there is does not change while it computes
        if group.spare_s(group.began_s) <= 0.0:
            return float("inf")
        if not group.suspended_s:
            return group.began_s
        # ageing 0: any suspension is more than allowed, so that it is the last one
        if not self._ageing:
            return float("inf")
        # the time t at which suspended = ageing * (computed + t - began)
        return max(group.began_s, group.began_s + group.suspended_s / self._ageing - group.computed_s)

    def resume_by_s(self, group: SequenceParallelGroup) -> float:
        """Return until when a paused group lets short requests in."""
        if self._ageing is None:
            return float("inf")
        # the time t at which suspended + t - paused_at = ageing * (computed + slice)
        allowed_s = self._ageing * (group.computed_s + self._slice_s) - group.suspended_s
        return group.paused_at_s + min(allowed_s, max(0.0, group.spare_s(group.paused_at_s)))


class PreemptionCandidates:
    """Computing groups in the order of preemption: the youngest first, so that the oldest finish. A group that begins
    now cannot be preempted yet."""

    def __init__(self, ageing: AgeingPolicy) -> None:
        self._ageing_policy = ageing
        # heaps; an entry is stale once its group no longer computes since the entry's `began_s`
        self._later: list[tuple[float, int, float, SequenceParallelGroup]] = []  # by when preemption is allowed
        self._ready: list[tuple[int, float, SequenceParallelGroup]] = []  # by youth

    def add(self, group: SequenceParallelGroup) -> None:
        """Add a group that computes from `began_s` on."""
        heappush(self._later, (self._ageing_policy.preemptible_at_s(group), group.order, group.began_s, group))

    def peek(self, now: float) -> SequenceParallelGroup | None:
        """Return the youngest group that may be preempted; it stays a candidate."""
        later, ready = self._later, self._ready
        while later and later[0][0] < now:
            _, order, began_s, group = heappop(later)
            # negated: the heap's top is the group committed last
            heappush(ready, (-order, -began_s, group))
        while ready:
            _, began_s, group = ready[0]
            # else stale: it was paused, or has begun again under a newer entry
            if group.computes and group.began_s == -began_s:
                return group
            heappop(ready)
        return None

    def pop(self, now: float) -> SequenceParallelGroup | None:
        """Remove and return the youngest group that may be preempted."""
        group = self.peek(now)
        if group is not None:
            heappop(self._ready)
        return group

    def next_s(self) -> float | None:
        """Return when the next group may be preempted; None if none will."""
        later = self._later
        while later:
            at_s, _, began_s, group = later[0]
            if group.computes and group.began_s == began_s:
                # heap order: if the first time is infinite, all are
                return at_s if at_s < float("inf") else None
            heappop(later)
        return None


class AgeingQueue:
    """Paused groups in order of the time at which ageing resumes them."""

    def __init__(self, ageing: AgeingPolicy) -> None:
        self._ageing_policy = ageing
        self._heap: list[tuple[float, int, float, SequenceParallelGroup]] = []

    def add(self, group: SequenceParallelGroup) -> None:
        """Add a group that was paused at `paused_at_s`."""
        due_s = self._ageing_policy.resume_by_s(group)
        if due_s < float("inf"):
            heappush(self._heap, (due_s, group.order, group.paused_at_s, group))

    def next_s(self) -> float | None:
        """Return the earliest time; None if there is none."""
        heap = self._heap
        while heap:
            due_s, _, paused_at_s, group = heap[0]
            if group.state == "paused" and group.paused_at_s == paused_at_s:
                return due_s
            heappop(heap)
        return None

    def due(self, now: float) -> list[SequenceParallelGroup]:
        """Remove and return the groups whose time has come; the caller closes them."""
        found = []
        while (due_s := self.next_s()) is not None and due_s <= now:
            found.append(heappop(self._heap)[3])
        return found
