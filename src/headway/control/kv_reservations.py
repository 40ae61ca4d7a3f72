"""The one account of KV room on instances: what they report as used, and what is reserved and not reported yet.

Live and simulated clusters decide by it. A live instance's report is its snapshot, ten per second; reservations count
from the decision until a snapshot shows their blocks. An engine sends a snapshot before `ReserveKv` and before
`SpanTaskDone` of a span that took blocks: from then on the snapshot counts. A simulated instance reports at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

KvLoad = tuple[int, int]
"""KV tokens of an instance in all, and those in use."""


class KvReservations:
    """Reserved tokens by instance, request and purpose, beside what the instances report."""

    def __init__(self, load: Callable[[int], KvLoad | None] = lambda number: (0, 0)) -> None:
        """load: what an instance reports; None: it is gone."""
        self._load = load
        self._of: dict[str, dict[tuple[int, str], int]] = {}
        self._on: Counter[int] = Counter()
        self.grown = False
        """Whether more was reserved since this was last set to False: only then may requests wait for each other."""

    def make(self, number: int, request: str, what: str, tokens: int) -> None:
        """Reserve tokens on an instance for a request and a purpose, in place of an earlier reservation of the two."""
        self.kept(number, request, what)
        self._of.setdefault(request, {})[number, what] = tokens
        self._on[number] += tokens
        self.grown = True

    def kept(self, number: int, request: str, what: str, left: int = 0) -> None:
        """Release a reservation that the instance reports as used now, but for `left` tokens. Harmless without one."""
        reserved = self._of.get(request, {})
        tokens = reserved.pop((number, what), None)
        if tokens is None:
            return
        self._on[number] -= tokens
        if left > 0:
            reserved[number, what] = left
            self._on[number] += left
        elif not reserved:
            del self._of[request]

    def forget(self, request: str, what: str | None = None) -> None:
        """Release a request's reservations on all instances, for one purpose or (None) for all."""
        for number, each in list(self._of.get(request, ())):
            if what in (None, each):
                self.kept(number, request, each)

    def on(self, number: int) -> int:
        """Return the tokens reserved on an instance."""
        return self._on[number]

    def total(self, number: int) -> int:
        """Return the KV tokens of an instance in all; 0 of one that is gone."""
        return (self._load(number) or (0, 0))[0]

    def free(self, number: int) -> int:
        """Return the tokens that are free on an instance by its last report; 0 on one that is gone."""
        total, used = self._load(number) or (0, 0)
        return total - used

    def room(self, number: int) -> int:
        """Return the tokens that are free on an instance and not reserved."""
        return self.free(number) - self._on[number]

    def roomiest(self, group: Iterable[int]) -> int:
        """Return the instance with the most room; of equals the first."""
        return max(sorted(group), key=self.room)

    def has(self, number: int, tokens: int) -> bool:
        """Return whether an instance has so much room. An empty pool counts as enough, and an instance that is gone:
        waiting would not help."""
        load = self._load(number)
        return load is None or (not self._on[number] and not load[1]) or self.room(number) >= tokens


class KvClaim(NamedTuple):
    """What a request has of the instances' KV, and what it needs beside that before it frees any of it."""

    request: str
    has: Mapping[int, int]
    """Tokens by instance."""
    needs: Mapping[int, int]
    """Tokens by instance that it waits for, or will grow by."""
    turns: Mapping[int, int]
    """Its place among those that wait on an instance, which are served in that order; empty: it waits for none."""
    resident: bool = False
    """Whether it is on a scheduler, which frees and recomputes its KV where another of its requests needs the room."""


def deadlocked(claims: Iterable[KvClaim], total: Callable[[int], int]) -> set[str]:
    """Return the requests that can never get what they need, in whatever order the others end.

    A state without any is safe in the sense of the banker's algorithm (Dijkstra, EWD 623): the requests can all end,
    one after the other. total: KV tokens of an instance in all. A request that is alone on an instance gets what it
    needs there, or is refused by it.
    """
    left = {claim.request: claim for claim in claims}
    while True:
        everything, kept, first = Counter[int](), Counter[int](), dict[int, int]()
        for claim in left.values():
            everything.update(claim.has)
            if not claim.resident:
                kept.update(claim.has)
            for number, turn in claim.turns.items():
                first[number] = min(turn, first.get(number, turn))
        able = [name for name, claim in left.items() if _able(claim, everything, kept, first, total)]
        if not able:
            return set(left)
        for name in able:
            del left[name]


def _able(
    claim: KvClaim,
    everything: Mapping[int, int],
    kept: Mapping[int, int],
    first: Mapping[int, int],
    total: Callable[[int], int],
) -> bool:
    """Whether a request can end beside those that are left. everything: what these have, by instance; kept: without
    those on schedulers; first: the first turn of those that wait there."""
    if any(turn != first[number] for number, turn in claim.turns.items()):
        return False
    taken, own = (kept, claim.has) if claim.resident else (everything, {})
    return all(
        not taken.get(number) or taken[number] + own.get(number, 0) + needed <= total(number)
        for number, needed in claim.needs.items()
    )


def gives_way(claims: Sequence[KvClaim], total: Callable[[int], int]) -> tuple[str, bool] | None:
    """Return the request whose KV is to be freed so that the others can go on, and whether that helps one; None: all
    can go on. claims: oldest request first; of those whose KV or turn another waits for the youngest is chosen."""
    names = deadlocked(claims, total)
    waiting = [claim for claim in claims if claim.request in names and not claim.resident]
    helps = [
        claim
        for claim in waiting
        if any(
            number in claim.has or claim.turns.get(number, turn) < turn
            for other in waiting
            if other is not claim
            for number, turn in other.turns.items()
        )
    ]
    return ((helps or waiting)[-1].request, bool(helps)) if waiting else None
