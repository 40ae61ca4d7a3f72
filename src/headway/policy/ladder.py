"""The ladder: in which order waiting prefills are computed, on one instance or on a cluster.

Each prefill has work left (seconds alone on the machine) and a time when its first token is due. Three steps:

1. As few as possible are late: in order of due times, whenever the work so far does not fit before a due time, the
   prefill with the most work left is taken out (Moore 1968, "An n job, one machine sequencing algorithm").
2. One that is taken out gets a later due time: `STEP` times the time since its arrival, again and again until it fits
   beside those that are in time. From then on it counts like any other, and its work counts `WEIGHT` times less in
   step 1 for each step that it has climbed: the longer it has waited, the rather another one is taken out.
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
WEIGHT = 2.0
"""Factor by which the work of a prefill counts less, for each step climbed, where one is chosen to be late. Above 1,
none is passed over for ever: after enough steps it counts less than any new one."""
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
    steps: list[int]
    """Steps that each has climbed: pass them to the next call, so that a prefill keeps its place."""


def ladder_order(
    arrival_s: Floats,
    due_s: Floats,
    work_s: Floats,
    steps: Sequence[int],
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
    if priority is None or len(set(priority)) <= 1:
        climbed = climb(arrivals, spans, works, steps, now, speed, ahead_s)
        return LadderOrder(
            shortest_first(_left_s(arrivals, spans, climbed, now, speed, ahead_s), works, places), climbed
        )
    order: list[int] = []
    result = list(steps)
    levels = np.asarray(priority)
    for level in sorted(set(priority)):
        members = np.flatnonzero(levels == level)
        indices = members.tolist()
        mine = arrivals[members], spans[members], works[members]
        climbed = climb(*mine, [steps[index] for index in indices], now, speed, ahead_s)
        for index, step in zip(indices, climbed, strict=True):
            result[index] = step
        placed = shortest_first(_left_s(*mine[:2], climbed, now, speed, ahead_s), mine[2], places)
        order += [indices[place] for place in placed]
        ahead_s += float(mine[2].sum())
    return LadderOrder(order, result)


def fewest_late(
    left_s: Floats, work_s: Floats, weight: Floats | None = None, yielding: Sequence[int] = ()
) -> list[int]:
    """Return the indices of the jobs to be late, in ascending order, so that all others are in time in order of due.

    `left_s`: seconds until a job is due, negative where that has passed; `work_s`: seconds of its work, one after the
    other at speed 1. As few as possible (Moore 1968). `weight`: factors of the works where the largest is taken out.
    `yielding`: indices that are taken out before all others. O(n log n)."""
    left, work = np.asarray(left_s, dtype=np.float64), np.asarray(work_s, dtype=np.float64)
    by_due = np.argsort(left, kind="stable")
    # Mostly all are in time: one vector operation tells.
    if not (work[by_due].cumsum() > left[by_due] + _EXACT_S).any():
        return []
    lefts, works = left.tolist(), work.tolist()
    sizes = works if weight is None else (work * np.asarray(weight, dtype=np.float64)).tolist()
    first = set(yielding)
    late: list[int] = []
    kept: list[tuple[bool, float, int]] = []
    done_s = 0.0
    for index in by_due.tolist():
        done_s += works[index]
        heapq.heappush(kept, (index not in first, -sizes[index], index))
        # Without weights one turn is enough: without the largest, all that remain end no later than before this job.
        while kept and done_s > lefts[index] + _EXACT_S:
            _, _, largest = heapq.heappop(kept)
            done_s -= works[largest]
            late.append(largest)
    return sorted(late)


def climb(
    arrival_s: Floats,
    span_s: Floats,
    work_s: Floats,
    steps: Sequence[int],
    now: float,
    speed: float = 1.0,
    ahead_s: float = 0.0,
) -> list[int]:
    """Return the steps after which all are in time, one after the other in order of due: arrival + span × `STEP`^steps.

    `span_s`: seconds from arrival to the due time at step 0, above 0. Those in time now keep their steps."""
    arrivals, spans, works = (np.asarray(values, dtype=np.float64) for values in (arrival_s, span_s, work_s))
    climbed = list(steps)
    weights = WEIGHT ** -np.asarray(steps, dtype=np.float64)
    yielding: set[int] = set()
    while late := fewest_late(
        _left_s(arrivals, spans, climbed, now, speed, ahead_s), works, weights, yielding=sorted(yielding)
    ):
        yielding.update(late)
        for index in late:
            climbed[index] += 1
            # Steps before the moment at which it could end if it went first need no comparison with others.
            soonest_s = now + (ahead_s + float(works[index])) / speed - float(arrivals[index])
            while float(spans[index]) * STEP ** climbed[index] < soonest_s:
                climbed[index] += 1
    return climbed


def _left_s(
    arrivals: npt.NDArray[np.float64],
    spans: npt.NDArray[np.float64],
    steps: Sequence[int],
    now: float,
    speed: float,
    ahead_s: float,
) -> npt.NDArray[np.float64]:
    """Return the seconds of work that can be done for each before it is due."""
    left: npt.NDArray[np.float64] = (
        arrivals + spans * STEP ** np.asarray(steps, dtype=np.float64) - now
    ) * speed - ahead_s
    return left


def shortest_first(left_s: Floats, work_s: Floats, places: int = PLACES) -> list[int]:
    """Return indices in the order of step 3: `places` of them chosen, the others in order of due times.

    Arguments as in `fewest_late`. O(n log n), and O(n) vector operations for each place."""
    left = np.asarray(left_s, dtype=np.float64)
    by_due = np.argsort(left, kind="stable")
    works = np.asarray(work_s, dtype=np.float64)[by_due]
    # Seconds by which a job ends before it is due, in order of due times.
    slack = left[by_due] - works.cumsum()
    count = len(works)
    for place in range(min(places, count - 1)):
        ahead, rest = slack[place:-1], works[place + 1 :]
        fits = rest <= SLACK_SHARE * np.minimum.accumulate(ahead)
        chosen = int(np.where(fits, rest, np.inf).argmin()) if fits.any() else -1
        if chosen < 0 or rest[chosen] >= works[place]:
            continue
        # Move it to this place: those due before it follow one place later, and have less slack.
        at = place + 1 + chosen
        index, work, kept_slack = by_due[at], works[at], slack[at]
        for array, value in ((by_due, index), (works, work)):
            array[place + 1 : at + 1] = array[place:at]
            array[place] = value
        slack[place + 1 : at + 1] = slack[place:at] - work
        slack[place] = kept_slack
    return [int(index) for index in by_due.tolist()]
