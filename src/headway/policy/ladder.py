"""The ladder: in which order waiting prefills are computed, on one instance or on a cluster.

Each prefill has work left (seconds alone on the machine) and a time when its first token is due. Three steps:

1. As few as possible are late: in order of due times, whenever the work so far does not fit before a due time, the
   prefill with the most work left is taken out (Moore 1968, "An n job, one machine sequencing algorithm").
2. One that is taken out gets a later due time: `STEP` times the time since its arrival, again and again until it fits
   beside those that are in time. From then on it counts like any other; after `FREE_STEPS` such steps its work counts
   `WEIGHT` times less in step 1 for each further one, so that rather another one is taken out.
3. Shortest first, as long as that harms no other: the prefill with the least work that fits `SLACK_SHARE` of the least
   slack of those due before it. The prefill with the earliest due time always qualifies.

Pure functions over sequences of numbers. `speed`: seconds of work that the machine does in a second (the share of an
instance that decodes leave to prefills, or the number of instances). `ahead_s`: seconds of work that precede all of
these. Ties go to the earlier index, so equal input gives equal output.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

STEP = 2.0
"""Factor by which the time from arrival to due time grows for a prefill that would be late."""
FREE_STEPS = 4
WEIGHT = 4.0
"""Factor by which the work of a prefill counts less, for each step climbed beyond `FREE_STEPS`, where one is chosen to
be late. Above 1, none is passed over for ever: after enough steps it counts less than any new one. From the first step
on it would cost shorts that are due now: it only bounds how late a request is where the load stays too high."""
SLACK_SHARE = 0.8
"""Share of the slack of earlier due prefills that a shorter one may use up: speeds and works are predictions."""
PLACES = 16
"""Places that step 3 decides; later ones go by due time, since the choice is made anew before they come up."""
LEAST_SPAN_S = 1e-3
"""Shortest time from arrival to due time that the ladder multiplies, seconds."""
_EXACT_S = 1e-9

Floats = Sequence[float] | npt.NDArray[np.float64]


class LadderOrder(NamedTuple):
    """Result of `ladder_order`."""

    order: list[int]
    """Indices of the prefills, first to compute first."""
    steps: npt.NDArray[np.int64]
    """Steps that each has climbed: pass them to the next call, so that a prefill keeps its place."""


def ladder_order(
    arrival_s: Floats,
    due_s: Floats,
    work_s: Floats,
    steps: Sequence[int] | npt.NDArray[np.int64],
    now: float,
    speed: float = 1.0,
    ahead_s: float = 0.0,
    priority: Sequence[int] | None = None,
    places: int = PLACES,
) -> LadderOrder:
    """Return the order of waiting prefills, and the steps that they have climbed.

    `due_s`: when each is due at step 0. `steps`: those climbed before; 0 for a new one. `priority`: strict levels, the
    smallest number first; the rule holds within a level, and the work of earlier levels precedes it. O(n log n), and
    O(n) vector operations for each place."""
    arrivals, works = (np.asarray(values, dtype=np.float64) for values in (arrival_s, work_s))
    spans = np.maximum(np.asarray(due_s, dtype=np.float64) - arrivals, LEAST_SPAN_S)
    climbed = np.array(steps, dtype=np.int64)
    order: list[int] = []
    for level in [0] if priority is None else sorted(set(priority)):
        members = np.arange(len(works)) if priority is None else np.flatnonzero(np.equal(priority, level))
        work = works[members]
        left, climbed[members] = _climb(arrivals[members], spans[members], work, climbed[members], now, speed, ahead_s)
        order += members[shortest_first(left, work, places)].tolist()
        ahead_s += float(work.sum())
    return LadderOrder(order, climbed)


def _climb(
    arrivals: npt.NDArray[np.float64],
    spans: npt.NDArray[np.float64],
    works: npt.NDArray[np.float64],
    steps: npt.NDArray[np.int64],
    now: float,
    speed: float,
    ahead_s: float,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the seconds of work that can be done for each before it is due, and the steps after which all are in time,
    one after the other in order of due: arrival + span × `STEP`^steps. Those in time now keep their steps."""
    left: npt.NDArray[np.float64] = (arrivals + spans * STEP**steps - now) * speed - ahead_s
    climbed, yielding = steps.copy(), None
    while late := fewest_late(left, works, steps, yielding):
        # In one call one that has climbed yields to all others, which are in time without it.
        yielding = yielding or late
        waited_s, step = now - arrivals[late], climbed[late] + 1
        # Steps before the moment at which it could end if it went first need no comparison with others.
        soonest_s = waited_s + (ahead_s + works[late]) / speed
        while (early := spans[late] * STEP**step < soonest_s).any():
            step += early
        climbed[late] = step
        left[late] = (spans[late] * STEP**step - waited_s) * speed - ahead_s
    return left, climbed


def fewest_late(
    left_s: Floats, work_s: Floats, steps: npt.NDArray[np.int64] | None = None, among: Sequence[int] | None = None
) -> list[int]:
    """Return the indices of the jobs to be late, in ascending order, so that all others are in time in order of due.

    `left_s`: seconds until a job is due, negative where that has passed; `work_s`: seconds of its work, one after the
    other at speed 1. As few as possible (Moore 1968). `steps`: those that each has climbed, for which it counts less.
    `among`: those that may be late, ascending, where all others are in time without them. O(n log n)."""
    left, work = np.asarray(left_s, dtype=np.float64), np.asarray(work_s, dtype=np.float64)
    by_due = left.argsort(kind="stable")
    # Seconds by which each job would end too late, in order of due.
    over_s = work[by_due].cumsum() - (left[by_due] + _EXACT_S)
    # Mostly all are in time: one vector operation tells.
    if not (over_s > 0.0).any():
        return []
    members = np.arange(len(left)) if among is None else np.asarray(among)
    sizes = work if steps is None else work * WEIGHT ** -np.maximum(steps - FREE_STEPS, 0)
    by_size = members[(-sizes[members]).argsort(kind="stable")]
    # The place of each member in that order, in order of due; others have none.
    none = len(by_size)
    ranks = np.full(len(left), none)
    ranks[by_size] = np.arange(none)
    ranks = ranks[by_due]
    # Without the largest, all that remain end no later than before: what is in time with all stays so.
    places = np.flatnonzero((over_s > 0.0) | (ranks < none))
    late: list[int] = []
    kept: list[int] = []
    taken_s = 0.0
    for rank, over in zip(ranks[places].tolist(), over_s[places].tolist(), strict=True):
        if rank < none:
            heapq.heappush(kept, rank)
        while kept and over > taken_s:
            largest = int(by_size[heapq.heappop(kept)])
            taken_s += float(work[largest])
            late.append(largest)
    return sorted(late)


def shortest_first(left_s: Floats, work_s: Floats, places: int = PLACES) -> list[int]:
    """Return indices in the order of step 3: `places` of them chosen, the others in order of due times.

    Arguments as in `fewest_late`. O(n log n), and O(n) vector operations for each place."""
    left = np.asarray(left_s, dtype=np.float64)
    by_due = left.argsort(kind="stable")
    # In order of due times; those that have got a place work for ever.
    works = np.asarray(work_s, dtype=np.float64)[by_due]
    # Seconds by which a job ends before it is due.
    slack = left[by_due] - works.cumsum()
    chosen: list[int] = []
    first = 0
    for _ in range(min(places, len(works) - 1)):
        while works[first] == np.inf:
            first += 1
        # The shortest of all mostly is the first, or fits.
        at = int(works.argmin())
        if at != first:
            if works[first] <= works[at]:
                at = first
            elif works[at] > SLACK_SHARE * np.minimum.reduce(slack[first:at]):
                rest, least = works[first + 1 :], np.minimum.accumulate(slack[first:-1])
                fitting = np.where(rest <= SLACK_SHARE * least, rest, np.inf)
                shortest = int(fitting.argmin())
                at = first + 1 + shortest if fitting[shortest] < works[first] else first
            # Those due before it follow, and have less slack.
            slack[first:at] -= works[at]
        chosen.append(at)
        slack[at] = works[at] = np.inf
    order: list[int] = by_due.tolist()
    placed = [order[at] for at in chosen]
    for at in sorted(chosen, reverse=True):
        del order[at]
    return placed + order
