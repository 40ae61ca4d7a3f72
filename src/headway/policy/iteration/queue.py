"""Waiting and half-done prefills as dense arrays, and the order in which an iteration considers them.

`LadderQueue` orders by the rule of `headway.policy.ladder`, `LineQueue` by the lines of another policy. A request that
computes lost KV again goes before all others of its priority: a client is reading its answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from headway.policy.iteration.ordering import UrgencyLine
from headway.policy.iteration.requests import PrefillState
from headway.policy.ladder import FREE_STEPS, LEAST_SPAN_S, STEP, ladder_order

REFRESH_S = 0.25
"""Seconds after which the ladder's order is made anew though no request came: works and speeds are predictions."""
PLACES = 8
"""Places of the ladder that go by length; the order is made anew once all of these have been computed."""

PACE = 0.85
"""Share of the predicted speed that the ladder counts on: later arrivals go first too, and predictions err."""

LONGEST_SPANS = STEP**FREE_STEPS
"""Where KV is short, a member that has waited for so many spans from its arrival to its due time goes before all
others (`_find_overdue`): by then its work counts less, too. Half of it costs others much: 7% fewer in time (Mooncake
at 1.4)."""

_Floats = npt.NDArray[np.float64]


class WaitingQueue(ABC):
    """Members in slots 0 to n - 1. Adding, changing and removing one is O(1)."""

    _floats: ClassVar[tuple[str, ...]] = ()
    """Names of the arrays of a subclass, one value for each member."""

    def __init__(self) -> None:
        self._members: list[PrefillState] = []
        # The last order; each member's place in it is its `rank`.
        self._order: list[PrefillState | None] = []
        # Members that hold KV, by order of arrival.
        self.begun: dict[int, PrefillState] = {}
        # Members that compute lost KV again, and members with a priority other than 0.
        self._restarted = self._prioritised = 0
        self._arrival_order = np.zeros(64, dtype=np.int64)
        self._priority = np.zeros(64, dtype=np.int64)
        for name in self._floats:
            setattr(self, name, np.zeros(64))

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[PrefillState]:
        return iter(self._members)

    @abstractmethod
    def ordered(self, now: float, speed: Callable[[], float], scarce: bool = False) -> list[PrefillState | None]:
        """Return the members, most urgent first; None for one that has left since the order was made.

        `speed`: returns the prefill seconds done in a second. `scarce`: requests have waited long for KV. The list must
        not be changed."""

    def put(self, member: PrefillState) -> None:
        """Add a member, or follow one whose work or deadline has changed."""
        if member.slot < 0:
            self._add(member)
        self._set(member)

    def _add(self, member: PrefillState) -> None:
        """Give a new member a slot."""
        slot = len(self._members)
        if slot == self._priority.size:
            # Double the capacity: amortised O(1).
            for name in ("_arrival_order", "_priority", *self._floats):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self._members.append(member)
        member.slot = slot
        self._arrival_order[slot], self._priority[slot] = member.order, member.request.priority
        self._count(member, 1)

    def remove(self, member: PrefillState) -> None:
        """Remove a member; the last one moves into its slot, which keeps the arrays dense."""
        slot, last = member.slot, len(self._members) - 1
        if slot != last:
            moved = self._members[last]
            for name in ("_arrival_order", "_priority", *self._floats):
                array = getattr(self, name)
                array[slot] = array[last]
            self._members[slot] = moved
            moved.slot = slot
        self._members.pop()
        member.slot = -1
        self._count(member, -1)
        # It may wait elsewhere before this order is made anew.
        if member.rank < len(self._order) and self._order[member.rank] is member:
            self._order[member.rank] = None

    def begun_from(self, place: int) -> list[PrefillState]:
        """Return the members that hold KV, from this place of the last order on. Costs nothing for the others."""
        return sorted((state for state in self.begun.values() if state.rank >= place), key=lambda state: state.rank)

    def current(self, now: float) -> list[PrefillState]:
        """Return the members as `ordered` does, and change nothing."""
        return [state for state in self.ordered(now, lambda: 1.0) if state is not None]

    def work_before_s(self, newcomer: PrefillState, now: float, speed: float) -> float:
        """Return the isolated seconds of work that goes before a newcomer, if nothing came after it."""
        self.put(newcomer)
        try:
            order = [state for state in self.ordered(now, lambda: speed) if state is not None]
        finally:
            self.remove(newcomer)
        return sum(state.work_s for state in order[: order.index(newcomer)])

    def note_begun(self, member: PrefillState, gained: bool) -> None:
        """Note that a member has gained KV, or has lost it."""
        if gained:
            self.begun[member.order] = member
        else:
            del self.begun[member.order]

    def _take(self, order: Sequence[PrefillState]) -> None:
        """Take over a new order."""
        self._order = list(order)
        for rank, member in enumerate(order):
            member.rank = rank

    @abstractmethod
    def _set(self, member: PrefillState) -> None:
        """Store what a member is ordered by."""

    def _count(self, member: PrefillState, step: int) -> None:
        self._restarted += step if member.generated else 0
        self._prioritised += step if member.request.priority else 0
        if member.holds_kv:
            self.note_begun(member, step > 0)


class LineQueue(WaitingQueue):
    """Order of lines. `parallel` lines keep their order until one changes."""

    _floats: ClassVar[tuple[str, ...]] = ("_intercept", "_slope")
    _intercept: _Floats
    _slope: _Floats

    def __init__(self, line: Callable[[PrefillState], UrgencyLine], parallel: bool) -> None:
        """`line`: returns a request's line: asked when it enters and when its work has changed."""
        super().__init__()
        self._line = line
        self._parallel = parallel
        # Whether a line has changed since the last order.
        self._changed = True

    @override
    def ordered(self, now: float, speed: Callable[[], float], scarce: bool = False) -> list[PrefillState | None]:
        if self._changed or not self._parallel:
            n, members = len(self._members), self._members
            urgency = self._intercept[:n] - self._slope[:n] * now
            # lexsort: the last key is the primary one.
            keys: list[npt.NDArray[np.float64] | npt.NDArray[np.int64]] = [self._arrival_order[:n], urgency]
            if self._restarted:
                keys.append(np.array([not member.generated for member in members], dtype=np.int64))
            if self._prioritised:
                keys.append(self._priority[:n])
            self._take([members[slot] for slot in np.lexsort(keys).tolist()])
            self._changed = False
        return self._order

    def _set(self, member: PrefillState) -> None:
        line, slot = self._line(member), member.slot
        self._intercept[slot], self._slope[slot] = line.intercept, line.slope
        self._changed = True


class LadderQueue(WaitingQueue):
    """Order of the ladder, made anew as requests come and every `REFRESH_S` seconds."""

    _floats: ClassVar[tuple[str, ...]] = ("_arrival", "_due", "_work", "_steps")
    _arrival: _Floats
    _due: _Floats
    _work: _Floats
    _steps: _Floats

    def __init__(self) -> None:
        super().__init__()
        self._until_s = float("-inf")
        # The last of the places that go by length; once it has left, the order is made anew.
        self._last_placed: PrefillState | None = None
        # One that has waited too long where KV is short: it goes first until it has entered, since what becomes free is
        # for it.
        self._overdue: PrefillState | None = None

    @override
    def ordered(self, now: float, speed: Callable[[], float], scarce: bool = False) -> list[PrefillState | None]:
        placed = self._last_placed
        if now >= self._until_s or (placed is not None and placed.slot < 0):
            overdue = self._overdue
            if overdue is None or overdue.slot < 0 or overdue.holds_kv:
                self._overdue = self._find_overdue(now) if scarce and self._members else None
            if self._restarted or self._overdue is not None:
                self._take(self._some_first(now, PACE * speed()))
            else:
                self._take(self._by_rule(self._members, now, PACE * speed()))
            self._until_s = now + REFRESH_S
            self._last_placed = self._order[min(PLACES, len(self._order)) - 1] if self._order else None
        return self._order

    @override
    def _add(self, member: PrefillState) -> None:
        super()._add(member)
        self._until_s = float("-inf")

    @override
    def current(self, now: float) -> list[PrefillState]:
        """Newcomers come last of their priority until the next decision."""
        order, known = self._order, len(self._order)
        return sorted(
            self._members,
            key=lambda m: (
                m.request.priority,
                m.rank if m.rank < known and order[m.rank] is m else known,
                m.deadline_s,
                m.order,
            ),
        )

    @property
    def late(self) -> int:
        """Members that will be late, so that others are in time."""
        return int(np.count_nonzero(self._steps[: len(self._members)]))

    def _find_overdue(self, now: float) -> PrefillState | None:
        """Return the member without KV that has waited longest, in spans from its arrival to its due time, of those
        with the first priority; None: none has waited `LONGEST_SPANS`."""
        n = len(self._members)
        arrival, priority = self._arrival[:n], self._priority[:n]
        spans = (now - arrival) / np.maximum(self._due[:n] - arrival, LEAST_SPAN_S)
        spans[[member.slot for member in self.begun.values()]] = 0.0
        spans[priority > priority.min()] = 0.0
        slot = int(spans.argmax())
        return self._members[slot] if spans[slot] >= LONGEST_SPANS else None

    def _by_rule(
        self, members: list[PrefillState], now: float, speed: float, ahead_s: float = 0.0
    ) -> list[PrefillState]:
        n = len(self._members)
        if n <= 1:
            return list(members)
        slots = slice(n) if members is self._members else [member.slot for member in members]
        climbed = self._steps[slots].astype(np.int64)
        order, steps = ladder_order(
            self._arrival[slots], self._due[slots], self._work[slots], climbed, now, speed, ahead_s,
            self._priority[slots].tolist() if self._prioritised else None, PLACES,
        )  # fmt: skip
        for index in np.flatnonzero(steps != climbed).tolist():
            member = members[index]
            member.steps = int(steps[index])
            self._steps[member.slot] = steps[index]
        return [members[index] for index in order]

    def _some_first(self, now: float, speed: float) -> list[PrefillState]:
        """Return the order in which some go first within each priority: those that compute lost KV again, the oldest
        first, then the overdue one."""
        again = [member for member in self._members if member.generated]
        first = sorted(again, key=lambda m: (m.request.priority, m.order))
        if self._overdue is not None and not self._overdue.generated:
            first.append(self._overdue)
        others = [member for member in self._members if not (member.generated or member is self._overdue)]
        placed = self._by_rule(others, now, speed, sum(m.work_s for m in first)) if len(others) > 1 else others
        return sorted([*first, *placed], key=lambda m: m.request.priority) if self._prioritised else [*first, *placed]

    def _set(self, member: PrefillState) -> None:
        slot = member.slot
        self._arrival[slot] = member.request.arrival_s
        self._due[slot], self._work[slot] = member.deadline_s, member.work_s
        self._steps[slot] = member.steps
