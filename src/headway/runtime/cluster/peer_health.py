"""Instances that run and cannot reach each other: found from lost spans and transfers, so that one of them is
restarted.

A cut connection is re-established by itself. Where that fails, everything that a policy gives to both ends is lost soon
after it has begun; the two then look idle, and get more work. After three such losses without a success in between one
end is restarted, then the other end; then one is given up, and the rest go on without it. An instance that reports
failures of several requests as its own is treated in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations_with_replacement
from typing import NamedTuple

LOSSES = 3
"""Losses on a link, without a success in between, after which one of its ends is restarted."""
_APART_S = 0.25
"""Losses less than so many seconds apart count as one: a cut ends everything under way on the link."""


class PeerVerdict(NamedTuple):
    """An instance that is to be restarted."""

    number: int
    for_good: bool
    """Whether to give it up instead: its restart did not help before."""


class _LinkHealth:
    """Losses between two instances, or of one instance by itself."""

    __slots__ = ("at_s", "ended", "losses", "requests")

    def __init__(self) -> None:
        # `at_s`: time of the last counted loss.
        self.losses, self.at_s = 0, float("-inf")
        self.requests: set[str] = set()
        """Requests that were lost on it."""
        self.ended: set[int] = set()
        """Ends that were restarted for it."""


class PeerHealth:
    """Attributes losses to instances of one cluster."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], _LinkHealth] = {}
        self._ending: set[int] = set()

    def lost(self, here: int, by: int, request: str, now: float) -> PeerVerdict | None:
        """Count a loss that instance `here` attributes to instance `by` (or itself); return the one to restart."""
        ends = (min(here, by), max(here, by))
        # One end is being restarted already: what is lost until it is gone has the same cause.
        if self._ending.intersection(ends):
            return None
        link = self._links.setdefault(ends, _LinkHealth())
        # An instance that fails by itself is suspect only with several requests: one may be to blame itself.
        if now - link.at_s < _APART_S or (here == by and request in link.requests):
            return None
        link.at_s = now
        link.losses += 1
        link.requests.add(request)
        if link.losses < LOSSES:
            return None
        # First an end that was not restarted for this link, then the one with more losses on all its links.
        number = max(set(ends), key=lambda end: (end not in link.ended, self._losses(end), end))
        verdict = PeerVerdict(number, number in link.ended)
        link.ended.add(number)
        self._ending.add(number)
        return verdict

    def worked(self, group: Iterable[int]) -> None:
        """Clear the losses between all pairs of a group whose task or transfer succeeded."""
        if self._links:
            for ends in combinations_with_replacement(sorted(group), 2):
                self._links.pop(ends, None)

    def gone(self, number: int) -> bool:
        """Start counting from zero for a lost instance's links; return whether `lost` had named it for a restart."""
        # `ended` is kept: a second verdict on the same end is final.
        for ends, link in self._links.items():
            if number in ends:
                link.losses = 0
                link.requests.clear()
        said = number in self._ending
        self._ending.discard(number)
        return said

    def _losses(self, end: int) -> int:
        return sum(link.losses for ends, link in self._links.items() if end in ends)
