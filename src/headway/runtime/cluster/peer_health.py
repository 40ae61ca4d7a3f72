"""Instances that run and cannot reach each other: found from lost spans and transfers, so that one of them is
restarted.

A connection that was cut is made again by itself. Where it cannot be, everything that a policy gives to both ends of it
is lost, soon after it has begun; so the two look idle, and get more. Three such losses with nothing between that went
well, and one end is started again; then the other end; then one is given up, and the rest go on without it. An instance
to which failures of several requests are laid by itself is treated alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations_with_replacement
from typing import NamedTuple

LOSSES = 3
"""As many make an instance suspect."""
_APART_S = 0.25
"""Losses closer to each other than that are one: a cut ends all that was under way over it."""


class PeerVerdict(NamedTuple):
    """An instance that is to be started again; for_good: that did not help before."""

    number: int
    for_good: bool


class _LinkHealth:
    """Between two instances, or of one with itself. `at_s`: of the last loss; requests: that were lost; ended: which
    of its ends were started again for it."""

    __slots__ = ("at_s", "ended", "losses", "requests")

    def __init__(self) -> None:
        self.losses, self.at_s = 0, float("-inf")
        self.requests: set[str] = set()
        self.ended: set[int] = set()


class PeerHealth:
    """Attributes losses to instances of one cluster."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], _LinkHealth] = {}
        self._ending: set[int] = set()

    def lost(self, here: int, by: int, request: str, now: float) -> PeerVerdict | None:
        """Something of a request was lost at an instance, which lays it to another, or to itself: who is to end."""
        ends = (min(here, by), max(here, by))
        if self._ending.intersection(ends):
            return None
        link = self._links.setdefault(ends, _LinkHealth())
        if now - link.at_s < _APART_S or (here == by and request in link.requests):
            return None
        link.at_s = now
        link.losses += 1
        link.requests.add(request)
        if link.losses < LOSSES:
            return None
        number = max(set(ends), key=lambda end: (end not in link.ended, self._losses(end), end))
        verdict = PeerVerdict(number, number in link.ended)
        link.ended.add(number)
        self._ending.add(number)
        return verdict

    def worked(self, group: Iterable[int]) -> None:
        """Something went well between these."""
        if self._links:
            for ends in combinations_with_replacement(sorted(group), 2):
                self._links.pop(ends, None)

    def gone(self, number: int) -> bool:
        """An instance is lost: what the next one does is counted anew. Whether `lost` had said so."""
        for ends, link in self._links.items():
            if number in ends:
                link.losses = 0
                link.requests.clear()
        said = number in self._ending
        self._ending.discard(number)
        return said

    def _losses(self, end: int) -> int:
        return sum(link.losses for ends, link in self._links.items() if end in ends)
