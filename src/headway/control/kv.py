"""The one account of KV room on instances, and the rule by which a span is admitted.

Live and simulated clusters decide by it. A live instance's report is its snapshot, ten per second; reservations count
from the decision until a snapshot shows their blocks. An engine sends a snapshot before `ReserveKv` and before
`SpanTaskDone` of a span that took blocks: from then on the snapshot counts. A simulated instance reports at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from headway.control.entries import SpanEntry

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


# Whether a span's KV fits on its group: blocks that are free there and not reserved (`KvReservations`).
#
# A span that waits for blocks on its group stops the group, and with it the requests whose end would free blocks. So a
# prompt's first span begins when there are free tokens for the whole prompt, and its later spans need no check. The
# prompt's tokens stay reserved until the ends of its spans are reported.
#
# Room on the instance that will decode is reserved as the prompt begins, and is not awaited before: in simulations with
# small decode pools, waiting for it too made mean times to first token 1.00 to 1.77 times as long, and none shorter.

_SLACK = 32
"""Tokens required beyond the need, for blocks that are only partly filled."""
_WHAT = "prompt"
PATIENCE_S = 60.0
"""Seconds after which a span begins in spite of too few free tokens: the instances then report why it cannot."""


class KvAdmission:
    """Admission of spans by KV, for one cluster."""

    def __init__(self, kv: KvReservations, clock: Callable[[], float], patience_s: float = PATIENCE_S) -> None:
        self._kv, self._clock, self._patience_s = kv, clock, patience_s
        self._since: dict[str, float] = {}

    @property
    def waiting(self) -> bool:
        """Whether a span waits for free tokens."""
        return bool(self._since)

    def fits(self, entry: SpanEntry) -> bool:
        """See `InstanceBackend.fits`."""
        # The first span's check covered the whole prompt, and a paused span has its blocks.
        if entry.index or entry.resumed:
            return True
        # Members of a batch may share instances: their needs add up.
        needs: dict[int, int] = {}
        members = span_members(entry)
        for member in members:
            for number, tokens in kv_needs(member).items():
                needs[number] = needs.get(number, 0) + tokens
        if all(self._kv.has(number, tokens + _SLACK) for number, tokens in needs.items()):
            self._since.pop(members[0].owner, None)
            return True
        now = self._clock()
        return now - self._since.setdefault(members[0].owner, now) >= self._patience_s

    def begun(self, entry: SpanEntry) -> None:
        """Reserve the tokens of a span that begins, and of the members of its batch."""
        for member in span_members(entry):
            self._since.pop(member.owner, None)
            if not member.index and not member.resumed:
                for number, tokens in kv_needs(member).items():
                    self._kv.make(number, member.owner, _WHAT, tokens)

    def done(self, entry: SpanEntry) -> None:
        """Shrink the reservation of a complete span, whose KV its group's snapshots show from now on."""
        for member in span_members(entry):
            needs = kv_needs(member)
            for number in member.group:
                # Later spans of the prompt will take the rest; after the last one nothing is outstanding.
                left = 0 if member.last else needs[number] - _share(member.span.end, member)
                self._kv.kept(number, member.owner, _WHAT, left)

    def forget(self, name: str) -> None:
        """Release the reservations of a request that has ended."""
        self._since.pop(name, None)
        self._kv.forget(name)


def span_members(entry: SpanEntry) -> list[SpanEntry]:
    """Return the members of a batch whose requests have not ended; the first may be missing too."""
    return [member for member in (entry, *entry.batched_with) if not member.controlled.ended]


def _share(tokens: int, entry: SpanEntry) -> int:
    # Rounded up: an even split leaves some instances of the group one token more.
    return -(-tokens // len(entry.group))


def kv_needs(entry: SpanEntry) -> dict[int, int]:
    """Return, for each instance, the most tokens of a request's KV that it holds at any time of the prefill.

    From the spans that are known; the last of them is taken to compute all of the prompt's rest.
    """
    found: dict[int, int] = {}
    entries = entry.controlled.entries or [entry]
    for each in entries:
        end = entry.controlled.request.prompt_tokens if each is entries[-1] else each.span.end
        for number in each.group:
            found[number] = max(found.get(number, 0), _share(end, each))
    return found
