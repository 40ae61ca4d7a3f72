"""Times of output tokens, kept once for all requests that decode together.

A cohort follows a decode group from epoch to epoch. It keeps the times of its steps; a member knows the step at which
it joined, so its token times are a slice, taken when it leaves. Work is done for those who join, leave or finish.
"""

from __future__ import annotations

import heapq

from headway.core.batch import DecodeGroup
from headway.core.request import Request
from headway.sim.workload import TraceRequest


class DecodeTrack:
    """One request in a scheduler, with the times of its tokens."""

    __slots__ = ("cohort", "deadline_s", "due_s", "ended_s", "error", "left", "rejected", "replica", "request",
                 "scheduled_s", "since", "source", "times")  # fmt: skip

    def __init__(self, request: Request, source: TraceRequest) -> None:
        self.request = request
        self.source = source
        self.left = max(1, source.output_tokens)
        """Output tokens that are missing, as of step `since` of the cohort."""
        self.times: list[float] = []
        """Times of its tokens, without those that the cohort still keeps for it."""
        self.cohort: DecodeCohort | None = None
        self.since = 0
        """The cohort's step from which on its times are this request's."""
        self.replica = -1
        self.scheduled_s: float | None = None
        self.deadline_s: float | None = None
        self.ended_s: float | None = None
        self.error: str | None = None
        self.rejected = False

    def settle(self) -> None:
        """Copy the times that the cohort has kept for this request."""
        cohort = self.cohort
        if cohort is not None:
            mine = cohort.times[self.since :]
            self.times += mine
            self.left -= len(mine)
            self.since = len(cohort.times)


class DecodeCohort:
    """A decode group over its epochs."""

    __slots__ = ("due", "epoch", "size", "times")

    def __init__(self) -> None:
        self.times: list[float] = []
        """The end of each of its steps."""
        self.due: list[tuple[int, str]] = []
        """Heap of (step, request): after which step each member has all of its tokens. May hold stale entries."""
        self.epoch = (0, 0)
        """(KV group, epoch of the decode group)."""
        self.size = 0


class DecodeCohorts:
    """All decode cohorts of one replica. `tracks`: its requests by id."""

    def __init__(self, tracks: dict[str, DecodeTrack]) -> None:
        self._tracks = tracks
        self._by_epoch: dict[tuple[int, int], DecodeCohort] = {}

    def of(self, group: DecodeGroup, where: int = 0) -> DecodeCohort:
        """Return the cohort of a decode group about to run in KV group `where`, brought to the group's epoch."""
        epoch = (where, group.epoch)
        cohort = self._by_epoch.get(epoch)
        if cohort is not None:
            return cohort
        cohort = self._by_epoch.pop((where, group.base), None) or DecodeCohort()
        for name in group.left:
            track = self._tracks.get(name)
            if track is not None and track.cohort is cohort:
                self.leave(track)
        for name in group.joined:
            track = self._tracks[name]
            self.leave(track)
            track.cohort = cohort
            track.since = len(cohort.times)
            cohort.size += 1
            heapq.heappush(cohort.due, (track.since + track.left, name))
        cohort.epoch = epoch
        self._by_epoch[epoch] = cohort
        return cohort

    def leave(self, track: DecodeTrack) -> None:
        """Remove a request from its cohort, if it has one."""
        cohort = track.cohort
        if cohort is None:
            return
        track.settle()
        track.cohort = None
        cohort.size -= 1
        if not cohort.size:  # reuse the cohort: drop the steps of its former members
            cohort.times.clear()
            cohort.due.clear()
            self._by_epoch.pop(cohort.epoch, None)

    def steps_left(self, cohort: DecodeCohort) -> int:
        """Return the steps until the first member has all of its tokens."""
        self._drop_stale(cohort)
        return cohort.due[0][0] - len(cohort.times) if cohort.due else 1 << 30

    def finished(self, cohort: DecodeCohort) -> list[str]:
        """Remove and return the members that have all of their tokens after the last step."""
        ended: list[str] = []
        if not cohort.due or cohort.due[0][0] > len(cohort.times):
            return ended
        while self.steps_left(cohort) <= 0:
            name = heapq.heappop(cohort.due)[1]
            self.leave(self._tracks[name])
            ended.append(name)
        return ended

    def _drop_stale(self, cohort: DecodeCohort) -> None:
        due = cohort.due
        while due:
            at, name = due[0]
            track = self._tracks.get(name)
            if track is not None and track.cohort is cohort and track.since + track.left == at:
                return
            heapq.heappop(due)
