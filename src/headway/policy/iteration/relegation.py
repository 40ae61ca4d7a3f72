"""Which requests are late when not all deadlines can be met: as few as possible, and none for ever.

Eager relegation as in Niyama/QoServe (arXiv 2503.22562): prompts that cannot all be in time are told apart before they
are late, and those that are given up wait behind the others. Which, is Moore and Hodgson's choice (the fewest late jobs
on one machine): in order of deadlines, whenever one cannot be met, the largest so far is given up. Departures from
Niyama: the choice is made anew several times a second, so that a request comes back once there is time; requests that
were given up get a fixed share of the work, the oldest first, so that their wait does not depend on later arrivals.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headway.policy.iteration.ordering import UrgencyLine
from headway.policy.iteration.prefill import PrefillState
from headway.policy.iteration.queue import WaitingQueue

REFRESH_S = 0.05
"""Seconds between two choices."""
# Intercepts in front of all others and behind them: far beyond any deadline in seconds, and exact to a microsecond.
_FIRST, _BEHIND = -1e9, 1e9
_TURN_S = 0.2
"""Work that requests which were given up get at a time, seconds."""


class DueWork(NamedTuple):
    """A request as the choice sees it."""

    due_s: float
    """Seconds until its first token is due; negative: it is late already."""
    work_s: float
    """Seconds of work left."""
    priority: int = 0
    """Of those with the highest number one is given up first, whatever its size."""


def fewest_late(jobs: Sequence[DueWork]) -> set[int]:
    """Return the indices of jobs to be late, so that all others are in time in order of deadlines.

    With equal priorities they are as few as possible (Moore 1968). O(n log n)."""
    late: set[int] = set()
    kept: list[tuple[int, float, int]] = []
    done_s = 0.0
    for index in sorted(range(len(jobs)), key=lambda i: jobs[i].due_s):
        due_s, work_s, priority = jobs[index]
        done_s += work_s
        heapq.heappush(kept, (-priority, -work_s, index))
        # Equal priorities need one turn: without the largest, all that remain end no later than before this job.
        while kept and done_s > due_s:
            _, negative_s, given_up = heapq.heappop(kept)
            done_s += negative_s
            late.add(given_up)
    return late


class RelegationChoice:
    """Choice of late requests in one group's queue, and the lines that carry it out.

    While all deadlines can be met the policy's own lines hold. Otherwise requests in time are ordered by deadline, and
    those that are given up follow, the least work first; `share` of the work done goes to the oldest of these. One that
    is given up thus waits at most (work of it and of older ones given up) / (share of the speed), whatever comes."""

    def __init__(self, share: float) -> None:
        """`share`: of the work done, for requests that were given up."""
        self._share = share
        # Requests that were given up, by order of arrival.
        self.late: dict[int, PrefillState] = {}
        # Of these, the one that has its turn ahead of all.
        self.turn: PrefillState | None = None
        # Work that the oldest request which was given up is owed, seconds.
        self._owed_s = 0.0
        self._chosen_s = float("-inf")
        # Whether the lines of all members are this object's, not the policy's.
        self.reorders = False
        self.chosen_total = 0
        """Times that a request was given up; one that comes back and is given up again counts twice."""

    def line(self, state: PrefillState, line: UrgencyLine) -> UrgencyLine:
        """Return the line of a request whose policy gives it `line`."""
        if not self.reorders:
            return line
        if state is self.turn:
            return UrgencyLine(_FIRST, 0.0)
        if state.order in self.late:
            return UrgencyLine(_BEHIND + state.work_s, 0.0)
        return UrgencyLine(state.deadline_s, 0.0)

    def choose(
        self, now: float, queue: WaitingQueue, speed: float, line: Callable[[PrefillState], UrgencyLine]
    ) -> None:
        """Choose anew which members of the queue are late, if the last choice is old.

        `speed`: work done in a second; `line`: the line of a member, by this object."""
        before, changed, whole = self.turn, set[int](), False
        if now - self._chosen_s >= REFRESH_S:
            self._chosen_s = now
            late = self._late(now, list(queue), speed)
            # Where the first is given up, or the last is no more, all lines change.
            whole = bool(late) != self.reorders
            changed = late.keys() ^ self.late.keys()
            self.chosen_total += len(late.keys() - self.late.keys())
            self.late, self.reorders = late, bool(late)
        self._give_turn()
        if self.turn is not before:
            changed |= {member.order for member in (before, self.turn) if member is not None}
        if changed or whole:
            for member in [m for m in queue if whole or m.order in changed]:
                queue.update(member, line(member))

    def worked(self, state: PrefillState, seconds: float) -> None:
        """Count work done on a request."""
        if not self.late:
            return
        oldest = self.late[min(self.late)]
        if state is oldest:
            self._owed_s -= seconds
        else:
            self._owed_s += seconds * self._share / (1.0 - self._share)
        # Spare time that it had is not held against it, nor is more owed than it could use at once.
        self._owed_s = min(max(self._owed_s, -_TURN_S), max(2 * _TURN_S, oldest.work_s))

    def left(self, state: PrefillState) -> None:
        """Forget a request that has left the queue."""
        self.late.pop(state.order, None)
        if state is self.turn:
            self.turn = None

    def _late(self, now: float, members: Sequence[PrefillState], speed: float) -> dict[int, PrefillState]:
        """Return the members to be late, by order of arrival."""
        # Without a first token yet: prefills that compute lost KV again have no deadline left, but their work counts.
        waiting = [m for m in members if not m.generated]
        again_s = sum(m.work_s for m in members if m.generated)
        late = fewest_late(_jobs(waiting, now, again_s, speed))
        if late:
            # What is late takes its share of the work from the others.
            late = fewest_late(_jobs(waiting, now, again_s, speed * (1.0 - self._share)))
        return {waiting[i].order: waiting[i] for i in sorted(late)}

    def _give_turn(self) -> None:
        """Let the oldest request that was given up go first while work is owed to it."""
        if self.turn is not None and (self._owed_s <= 0 or self.turn.order not in self.late):
            self.turn = None
        if self.turn is None and self.late:
            oldest = self.late[min(self.late)]
            if self._owed_s >= min(_TURN_S, oldest.work_s):
                self.turn = oldest
        if not self.late:
            self._owed_s = 0.0


def _jobs(members: Sequence[PrefillState], now: float, ahead_s: float, speed: float) -> list[DueWork]:
    """Return members as jobs of a machine that does one second of work a second."""
    return [DueWork((m.deadline_s - now) * speed - ahead_s, m.work_s, m.request.priority) for m in members]
