"""Times of output tokens, stored once for all requests that decode together.

A cohort follows a decode group from epoch to epoch and stores the end of each step. A member stores the step at which
it joined, so its token times are a slice of the cohort's, copied when it leaves. The cost of a step does not depend on
the number of members; only joining, leaving and finishing do.
"""

from __future__ import annotations

import heapq

from headway.core.batch import DecodeGroup
from headway.core.request import Request
from headway.perf.latency.base import LatencyModel
from headway.sim.workload import TraceRequest


class DecodeTrack:
    """One request in a scheduler, with the times of its output tokens (virtual seconds)."""

    __slots__ = ("cached_tokens", "cohort", "deadline_s", "due_s", "ended_s", "error", "left", "owner", "rejected",
                 "replica", "request", "scheduled_s", "since", "source", "times")  # fmt: skip

    def __init__(self, request: Request, source: TraceRequest) -> None:
        self.request = request
        """As the scheduler sees it."""
        self.owner = request.id
        """Id of the request that it serves, which may have another one in the scheduler."""
        self.source = source
        self.left = max(1, source.output_tokens)
        """Output tokens still to come, as of step `since` of the cohort."""
        self.times: list[float] = []
        """Times of the tokens, without those that are still stored in the cohort only."""
        self.cohort: DecodeCohort | None = None
        """The cohort where the request decodes; None while it prefills or waits."""
        self.since = 0
        """First step of the cohort that gave this request a token."""
        self.replica = -1
        """Index of the replica that serves the request; -1 before it is routed."""
        self.scheduled_s: float | None = None
        self.deadline_s: float | None = None
        """First-token deadline that the scheduler assigned, if its policy has any."""
        self.ended_s: float | None = None
        self.error: str | None = None
        self.rejected = False
        self.cached_tokens = request.cached_tokens
        """Tokens of the prompt that were cached when the request was first scheduled."""

    def settle(self) -> None:
        """Copy this request's token times from the cohort."""
        cohort = self.cohort
        if cohort is not None:
            mine = cohort.times[self.since :]
            # `since + left` is unchanged by this, so the cohort's heap entry remains valid
            self.times += mine
            self.left -= len(mine)
            self.since = len(cohort.times)


class DecodeCohort:
    """The token times of a decode group over its epochs."""

    __slots__ = ("due", "epoch", "size", "times")

    def __init__(self) -> None:
        self.times: list[float] = []
        """End of each step, virtual seconds."""
        self.due: list[tuple[int, str]] = []
        """Heap of (step, request): the step after which a member has all of its tokens. May hold stale entries."""
        self.epoch = (0, 0)
        """(KV group, epoch of the decode group)."""
        self.size = 0


class DecodeCohorts:
    """All decode cohorts of one replica, by KV group and epoch. `tracks`: the replica's requests by id."""

    def __init__(self, tracks: dict[str, DecodeTrack]) -> None:
        self._tracks = tracks
        self._by_epoch: dict[tuple[int, int], DecodeCohort] = {}

    def of(self, group: DecodeGroup, where: int = 0) -> DecodeCohort:
        """Return the cohort of a decode group about to run in KV group `where`, brought to the group's epoch."""
        epoch = (where, group.epoch)
        cohort = self._by_epoch.get(epoch)
        if cohort is not None:
            return cohort
        # a new epoch changes its base epoch by `left` and `joined`: update that cohort in place
        cohort = self._by_epoch.pop((where, group.base), None) or DecodeCohort()
        for name in group.left:
            track = self._tracks.get(name)
            # an aborted request has left its cohort already
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
        # without members no slice refers to the steps: drop them (`of` may go on with the emptied cohort)
        if not cohort.size:
            cohort.times.clear()
            cohort.due.clear()
            self._by_epoch.pop(cohort.epoch, None)

    def steps_left(self, cohort: DecodeCohort) -> int:
        """Return the number of steps until the first member has all of its tokens."""
        self._drop_stale(cohort)
        # without members any number of steps is possible
        return cohort.due[0][0] - len(cohort.times) if cohort.due else 1 << 30

    def finished(self, cohort: DecodeCohort) -> list[str]:
        """Remove and return the members that have all of their tokens after the last step."""
        ended: list[str] = []
        # the heap's minimum bounds valid and stale entries alike: usually nothing is due, and nothing need be dropped
        if not cohort.due or cohort.due[0][0] > len(cohort.times):
            return ended
        while self.steps_left(cohort) <= 0:
            name = heapq.heappop(cohort.due)[1]
            self.leave(self._tracks[name])
            ended.append(name)
        return ended

    def _drop_stale(self, cohort: DecodeCohort) -> None:
        # an entry is stale when its request has left, joined another cohort, or joined this one again
        due = cohort.due
        while due:
            at, name = due[0]
            track = self._tracks.get(name)
            if track is not None and track.cohort is cohort and track.since + track.left == at:
                return
            heapq.heappop(due)


def repeat_decodes(
    latency: LatencyModel,
    decodes: DecodeGroup,
    times: list[float],
    between_s: tuple[float, float],
    most: int,
    busy_s: float,
) -> tuple[float, float, int]:
    """Repeat an iteration of the same decodes, on one stage and without noise: the simulator's innermost loop.

    between_s: (end of the first iteration, time by which the last one must begin). times: gets the end of every
    iteration but the last. Return the end of the last, `busy_s` with the further ones, and how many there are in all.
    """
    (end_s, quiet_s), count = between_s, len(decodes.members)
    kv_sum, repeats = decodes.kv_sum, 1
    rows_s, decode_s = latency.rows_s(count), latency.decode_steps(count)
    while repeats < most and end_s < quiet_s:
        # one more KV token for each decode than in the iteration before
        kv_sum += count
        stage_s = rows_s + decode_s(kv_sum)
        times.append(end_s)
        end_s += stage_s
        busy_s += stage_s
        repeats += 1
    return end_s, busy_s, repeats
