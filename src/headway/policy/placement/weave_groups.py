"""Rings that yield: what Weave knows of prompts that it has committed to groups, and what each may still give away.

Medha's space sharing, for work that has no iterations: a long prefill gives part of its time, the larger the more
relative slack it has, to short ones that wait. A ring's instances compute in lockstep, so what enters on one of them is
what the whole ring waits for; it is charged with what it is predicted to be delayed by, and never yields more than its
share of its own time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.policy.placement.view import ClusterSnapshot


class PlacedGroup:
    """A prompt on groups of instances. Seconds are predicted, times absolute.

    groups: of its spans, nested. starts_s: when each is to begin; edges_s: how long each computes between two places
    where it can be paused; work_s: what they take together; deadline_s: of its first token. end_s: when that is
    expected. index: the span that runs or comes next. given_s: what it has yielded.
    """

    __slots__ = ("deadline_s", "edges_s", "end_s", "given_s", "groups", "index", "pausing", "request", "starts_s",
                 "work_s")  # fmt: skip

    def __init__(
        self,
        request: str,
        groups: Sequence[tuple[int, ...]],
        starts_s: Sequence[float],
        edges_s: Sequence[float],
        end_s: float,
        work_s: float,
        deadline_s: float,
    ) -> None:
        self.request, self.groups = request, tuple(groups)
        self.starts_s, self.edges_s, self.end_s = list(starts_s), tuple(edges_s), end_s
        self.work_s, self.deadline_s = work_s, deadline_s
        self.index = 0
        self.given_s = 0.0
        self.pausing = False

    @property
    def group(self) -> tuple[int, ...]:
        """Of the span that runs or comes next."""
        return self.groups[self.index]

    @property
    def edge_s(self) -> float:
        """Until the span that runs can be paused, at most."""
        return self.edges_s[self.index]

    def slack(self, now: float) -> float:
        """Relative slack, as Medha §4.1's: seconds to spare, in units of its own work. Known queueing counts."""
        return (self.deadline_s - max(now, self.end_s)) / max(self.work_s, 1e-9)

    def left_to_give_s(self, now: float, least: float, most: float) -> float:
        """Seconds that it may still be delayed by, when its share of yielding lies between `least` and `most`."""
        share = min(most, max(least, self.slack(now)))
        return self.work_s * share / (1.0 - share) - self.given_s

    def delay(self, seconds: float) -> None:
        """It has yielded."""
        self.given_s += seconds
        self.end_s += seconds
        for k in range(self.index, len(self.starts_s)):
            self.starts_s[k] += seconds


class PlacedGroups:
    """All rings that have not ended, in order of commitment on each instance: the order in which they take turns."""

    def __init__(self) -> None:
        self._by_request: dict[str, PlacedGroup] = {}
        self._on: dict[int, list[PlacedGroup]] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request: str) -> PlacedGroup | None:
        return self._by_request.get(request)

    def on(self, instance: int) -> Sequence[PlacedGroup]:
        """The rings that run or wait there, in turn."""
        return self._on.get(instance, ())

    def all(self) -> Iterable[PlacedGroup]:
        """In order of commitment."""
        return self._by_request.values()

    def occupied(self) -> Iterable[int]:
        """Instances that have any."""
        return sorted(i for i, rings in self._on.items() if rings)

    def add(self, ring: PlacedGroup) -> None:
        self._by_request[ring.request] = ring
        for i in ring.groups[-1]:
            self._on.setdefault(i, []).append(ring)

    def remove(self, request: str) -> None:
        ring = self._by_request.pop(request, None)
        if ring is not None:
            for i in ring.groups[-1]:
                self._on[i].remove(ring)

    def runs(self, ring: PlacedGroup, view: ClusterSnapshot) -> bool:
        """Whether a ring's span is on its instances now: it is next on all of them, and their schedulers are empty."""
        return all(self._on[i][0] is ring and not view.instances[i].running for i in ring.group)
