"""Limits of restarts: repeated failures have a cause that a restart does not remove."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headway.core.errors import HeadwayError


class GaveUpError(HeadwayError):
    """The limit of restarts was reached: the caller must not retry."""


class RestartLimit:
    """Allows `limit` restarts within `window_s` seconds in which the component was up.

    The duration of restarts, which may be long, does not count: a component that loads for minutes and dies at once
    reaches the limit too. what: names the component in the error.
    """

    def __init__(self, limit: int, what: str, window_s: float = 60.0) -> None:
        self.limit = limit
        self.window_s = window_s
        self._what = what
        self._losses: deque[float] = deque()
        """When restarts were counted, in seconds that the component had been up by then since its first restart."""
        self._uptime_s = 0.0
        self._up_s: float | None = None

    def record_up(self, now: float) -> None:
        """Note that a restart is complete."""
        self._up_s = now

    def spend(self, now: float, why: str) -> None:
        """Count one more restart. Raises GaveUpError, with the reason `why` of this loss, when it is one too many."""
        if self._up_s is not None:
            self._uptime_s += now - self._up_s
        self._up_s = None
        while self._losses and self._uptime_s - self._losses[0] > self.window_s:
            self._losses.popleft()
        if len(self._losses) >= self.limit:
            raise GaveUpError(
                f"{why}; {self._what} started again {self.limit} times within {self.window_s:g} s of running, which is "
                "the limit"
            )
        self._losses.append(self._uptime_s)


class PoisonRequestTracker:
    """Counts for each request the losses of workers at which it lost KV.

    A request that was being computed at every loss may be their cause, however long it takes to do harm.
    """

    def __init__(self) -> None:
        self._losses: dict[str, int] = {}

    def record_loss(self, requests: Iterable[str], live: Iterable[str], limit: int) -> list[str]:
        """Count a loss of workers at which `requests` lost KV. Returns the live requests with more than `limit` losses.

        These should not be started again.
        """
        # Counts of ended requests are dropped, so the table does not grow.
        alive = set(live)
        counted = {name: self._losses.get(name, 0) for name in alive}
        for name in alive.intersection(requests):
            counted[name] += 1
        self._losses = {name: count for name, count in counted.items() if count}
        return sorted(name for name, count in self._losses.items() if count > limit)
