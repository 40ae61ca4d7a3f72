"""Waiting and half-done prefills, ordered by (priority, urgency now, order of arrival) without sorting them all.

Two ways: where all lines have the same slope, their order never changes and a sorted list keeps it; otherwise (LARS)
the lines are dense arrays: they are sorted anew, and of very many each of the first is found by one vector operation.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from headway.policy.iteration.ordering import UrgencyLine
from headway.policy.iteration.prefill import LONG

if TYPE_CHECKING:
    from headway.policy.iteration.prefill import PrefillState

_FIRST = 16
"""Members of many found one by one before the rest is sorted: mostly all that one decision consumes."""
_FEW, _MANY = 12, 128
"""So few are sorted without arrays; up to so many at once, which takes as long as to find five of them."""
_AHEAD_S = (60.0, 4.0, 0.25)
"""How far ahead it is asked whether the first members stay the first, seconds."""

_Slots = npt.NDArray[np.bool_]
QueueKey = tuple[int, float, int]
"""What members are ordered by: (priority, urgency, order of arrival)."""


class SizeBound:
    """Which members `WaitingQueue.ordered` yields; may change while it is consumed."""

    __slots__ = ("below",)

    def __init__(self) -> None:
        # Members of a smaller size.
        self.below = LONG + 1


_ALL = SizeBound()


class WaitingQueue(Protocol):
    """Queue of prefills. A member's `slot` is its place, negative outside the queue."""

    sizes: list[int]
    """How many members there are of each size."""
    begun: dict[int, PrefillState]
    """Members that hold KV, by `order`; kept by `note_begun`."""
    begun_sizes: list[int]
    """How many of these there are of each size."""
    prioritised: int
    """How many members have a priority other than 0."""
    most_known: int
    """No member without KV has more tokens to compute or cached."""
    waiting_changes: int
    """Counts changes of the other members: while it stays, they and their lines are the same."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[PrefillState]: ...

    def add(self, member: PrefillState, line: UrgencyLine) -> None: ...

    def update(self, member: PrefillState, line: UrgencyLine) -> None: ...

    def remove(self, member: PrefillState) -> None: ...

    def note_begun(self, member: PrefillState, gained: bool) -> None:
        """Count a member that has gained KV, or has lost it."""

    def yields(self, member: PrefillState) -> bool:
        """Whether a member may yield time: not where all smaller ones that are here have a lower priority."""

    def ordered(self, now: float, sizes: SizeBound = ...) -> Iterator[PrefillState]:
        """Members of these sizes, most urgent first. The queue must not change while this is consumed."""

    def begun_ordered(self, now: float) -> list[PrefillState]:
        """Return the members that hold KV, most urgent first. Costs nothing for the others."""

    def key(self, member: PrefillState, now: float) -> QueueKey:
        """Return what a member is ordered by."""

    def first_until(self, first: Collection[PrefillState], now: float) -> float:
        """Return how long `first`, the most urgent members without KV, surely stay those, in seconds like `now`.

        While `waiting_changes` stays. Before `now`: they may not even now."""


class _QueueCounts:
    """Counts of members by size, and the members that hold KV, for both queues."""

    def __init__(self) -> None:
        self.sizes, self.begun_sizes = [0, 0, 0], [0, 0, 0]
        self.begun: dict[int, PrefillState] = {}
        self.waiting_changes = self.prioritised = self.most_known = 0
        # By size: members by priority.
        self._priorities: tuple[dict[int, int], ...] = {}, {}, {}

    def note_begun(self, member: PrefillState, gained: bool) -> None:
        """See `WaitingQueue`."""
        self.waiting_changes += 1
        if gained:
            self.begun[member.order] = member
        else:
            del self.begun[member.order]
            self.most_known = max(self.most_known, member.known)
        self.begun_sizes[member.size] += 1 if gained else -1

    def yields(self, member: PrefillState) -> bool:
        """See `WaitingQueue`."""
        if not self.prioritised:
            return True
        smaller = [min(found) for found in self._priorities[: member.size] if found]
        return not smaller or min(smaller) <= member.request.priority

    def _count(self, member: PrefillState, step: int) -> None:
        """Count a member that is added (step 1) or removed (-1)."""
        self.sizes[member.size] += step
        priority, priorities = member.request.priority, self._priorities[member.size]
        count = priorities.get(priority, 0) + step
        if priority:
            self.prioritised += step
        # clients choose priorities: keep those that are there
        if count:
            priorities[priority] = count
        else:
            del priorities[priority]
        if member.holds_kv:
            self.note_begun(member, step > 0)
        else:
            self.waiting_changes += 1
            self.most_known = max(self.most_known, member.known)
        if not any(self.sizes):
            self.most_known = 0  # a bound: it shrinks only as the queue empties


def make_queue(parallel: bool) -> WaitingQueue:
    """The queue for lines that are all parallel, or for any lines."""
    return SortedQueue() if parallel else PrefillQueue()


class SortedQueue(_QueueCounts):
    """Queue for parallel lines, whose order never changes by itself: a sorted list of (priority, intercept, order).

    Changes cost O(log n) and a memory move; iteration in order is free."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[QueueKey] = []
        self._members: dict[int, PrefillState] = {}
        self._keys: dict[int, QueueKey] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PrefillState]:
        return iter(self._members.values())

    def add(self, member: PrefillState, line: UrgencyLine) -> None:
        member.slot = 0
        self._members[member.order] = member
        self._count(member, 1)
        self._enter(member, line)

    def update(self, member: PrefillState, line: UrgencyLine) -> None:
        # Equal slopes: the intercept alone decides the order.
        if self._keys[member.order][1] != line.intercept:
            self.waiting_changes += not member.holds_kv
            self._leave(member)
            self._enter(member, line)

    def remove(self, member: PrefillState) -> None:
        self._leave(member)
        del self._members[member.order], self._keys[member.order]
        member.slot = -1
        self._count(member, -1)

    def ordered(self, now: float, sizes: SizeBound = _ALL) -> Iterator[PrefillState]:
        """See `WaitingQueue`."""
        for _, _, order in self._entries:
            member = self._members[order]
            if member.size < sizes.below:
                yield member

    def begun_ordered(self, now: float) -> list[PrefillState]:
        """See `WaitingQueue`."""
        return sorted(self.begun.values(), key=lambda member: self._keys[member.order])

    def key(self, member: PrefillState, now: float) -> QueueKey:
        """See `WaitingQueue`."""
        return self._keys[member.order]

    def first_until(self, first: Collection[PrefillState], now: float) -> float:
        """See `WaitingQueue`."""
        return float("inf")

    def _enter(self, member: PrefillState, line: UrgencyLine) -> None:
        key = (member.request.priority, line.intercept, member.order)
        self._keys[member.order] = key
        insort(self._entries, key)

    def _leave(self, member: PrefillState) -> None:
        del self._entries[bisect_left(self._entries, self._keys[member.order])]


class PrefillQueue(_QueueCounts):
    """Queue for lines of any slope, as dense arrays indexed by `slot`.

    Add, update and remove are O(1); a pass over the first few members is O(n) in vector operations."""

    def __init__(self) -> None:
        super().__init__()
        self._members: list[PrefillState] = []
        # Lines by slot, as in the arrays: reading single floats of those is slow.
        self._lines: list[UrgencyLine] = []
        self._intercept = np.zeros(64)
        self._slope = np.zeros(64)
        self._order = np.zeros(64, dtype=np.int64)
        self._priority = np.zeros(64, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[PrefillState]:
        return iter(self._members)

    def add(self, member: PrefillState, line: UrgencyLine) -> None:
        slot = len(self._members)
        if slot == self._intercept.size:
            # Double the capacity: amortised O(1).
            for name in ("_intercept", "_slope", "_order", "_priority"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self._members.append(member)
        self._lines.append(line)
        member.slot = slot
        self._order[slot] = member.order
        self._priority[slot] = member.request.priority
        self._count(member, 1)
        self.update(member, line)

    def update(self, member: PrefillState, line: UrgencyLine) -> None:
        slot = member.slot
        self._lines[slot] = line
        self._intercept[slot], self._slope[slot] = line.intercept, line.slope
        if not member.holds_kv:
            self.waiting_changes += 1

    def remove(self, member: PrefillState) -> None:
        """Remove a member; the last one moves into its slot, which keeps the arrays dense."""
        slot, last = member.slot, len(self._members) - 1
        moved = self._members[last]
        for array in (self._intercept, self._slope, self._order, self._priority):
            array[slot] = array[last]
        self._members[slot], self._lines[slot] = moved, self._lines[last]
        moved.slot = slot
        self._members.pop()
        self._lines.pop()
        member.slot = -1
        self._count(member, -1)

    def ordered(self, now: float, sizes: SizeBound = _ALL) -> Iterator[PrefillState]:
        """See `WaitingQueue`."""
        if len(self._members) <= _FEW:
            return self._few_ordered(now, sizes)
        return self._many_ordered(now, sizes)

    def _few_ordered(self, now: float, sizes: SizeBound) -> Iterator[PrefillState]:
        for member in self._sorted(self._members, now):
            if member.size < sizes.below:
                yield member

    def _many_ordered(self, now: float, sizes: SizeBound) -> Iterator[PrefillState]:
        """Yield `ordered`. The first of very many are found one by one, the rest is sorted."""
        n, members = len(self._members), self._members
        # Urgency of all members at once, intercept - slope * now; the copy is overwritten below.
        keys = self._intercept[:n] - self._slope[:n] * now
        taken: list[int] = []
        # While there are other priorities, the key alone does not order.
        if n > _MANY and not self.prioritised:
            slot = int(keys.argmin())
            while len(taken) < _FIRST:
                # Mask the member that is about to be yielded, to find the one behind it.
                key, keys[slot] = keys[slot], np.inf
                following = int(keys.argmin())
                # A tie, which needs the order of arrival; or all are masked (key is infinite): leave both to the sort.
                if keys[following] == key:
                    keys[slot] = key
                    break
                taken.append(slot)
                if members[slot].size < sizes.below:
                    yield members[slot]
                slot = following
        # lexsort: the last key is the primary one.
        order = self._order[:n]
        sorted_slots = np.lexsort((order, keys, self._priority[:n]) if self.prioritised else (order, keys))
        yielded = set(taken)
        for slot in sorted_slots.tolist():
            if members[slot].size < sizes.below and slot not in yielded:
                yield members[slot]

    def begun_ordered(self, now: float) -> list[PrefillState]:
        """See `WaitingQueue`."""
        return self._sorted(self.begun.values(), now)

    def _sorted(self, members: Collection[PrefillState], now: float) -> list[PrefillState]:
        return sorted(members, key=lambda member: self.key(member, now)) if len(members) > 1 else list(members)

    def key(self, member: PrefillState, now: float) -> QueueKey:
        """See `WaitingQueue`."""
        line = self._lines[member.slot]
        return member.request.priority, line.intercept - line.slope * now, member.order

    def first_until(self, first: Collection[PrefillState], now: float) -> float:
        """See `WaitingQueue`."""
        slots = [member.slot for member in first]
        others = np.ones(len(self._members), dtype=bool)
        others[slots] = False
        others[[member.slot for member in self.begun.values()]] = False
        if not others.any():
            return float("inf")
        if self.prioritised:
            return float("-inf")
        last = self._lines[max(first, key=lambda member: self.key(member, now)).slot]
        n = len(others)
        # Equal lines keep their order of arrival.
        tied = (self._intercept[:n] == last.intercept) & (self._slope[:n] == last.slope)
        ahead = np.zeros(n, dtype=bool)
        ahead[slots] = True
        pairs = ((ahead, others & ~tied), (ahead & ~tied, others))
        # Lines that do not meet at two times do not meet between them.
        if not self._apart(pairs, now):
            return float("-inf")
        return next((now + ahead_s for ahead_s in _AHEAD_S if self._apart(pairs, now + ahead_s)), float("-inf"))

    def _apart(self, pairs: Iterable[tuple[_Slots, _Slots]], now: float) -> bool:
        """Whether the first members of each pair are all more urgent at a time than the second, rounding aside."""
        n = len(self._members)
        keys = self._intercept[:n] - self._slope[:n] * now
        margin = 1e-9 * (1.0 + float(np.abs(self._intercept[:n]).max()) + float(self._slope[:n].max()) * abs(now))
        return all(
            float(keys[ahead].max(initial=-np.inf)) + margin < float(keys[behind].min(initial=np.inf))
            for ahead, behind in pairs
        )
