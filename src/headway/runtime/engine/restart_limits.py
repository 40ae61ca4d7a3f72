"""Limits of restarts: repeated failures have a cause that a restart does not remove."""

from __future__ import annotations

from collections.abc import Iterable

from headway.core.errors import HeadwayError


class GaveUpError(HeadwayError):
    """The limit of restarts was reached: the caller must not retry."""


class RestartLimit:
    """Allows `limit` restarts in a row. A row ends when the restarted component has been up for `window_s` seconds.

    The duration of the restart itself, which may be long, does not count. what: names the component in the error.
    """

    def __init__(self, limit: int, what: str, window_s: float = 60.0) -> None:
        self.limit = limit
        self.window_s = window_s
        self._what = what
        self._spent = 0
        self._up_s: float | None = None

    def record_up(self, now: float) -> None:
        """Note that a restart is complete."""
        self._up_s = now

    def spend(self, now: float, why: str) -> None:
        """Count one more restart. Raises GaveUpError, with the reason `why` of this loss, when it is one too many."""
        # The row is broken by a long enough uptime, checked at the next loss.
        if self._up_s is not None and now - self._up_s >= self.window_s:
            self._spent = 0
        self._up_s = None
        if self._spent >= self.limit:
            raise GaveUpError(
                f"{why}; {self._what} started again {self.limit} times and never stayed up for {self.window_s:g} s, "
                "which is the limit"
            )
        self._spent += 1


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
