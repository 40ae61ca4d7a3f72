"""How often is it worth beginning again? Whatever dies over and over dies of a cause that a restart does not remove."""

from __future__ import annotations

from collections.abc import Iterable

from headway.core.errors import HeadwayError


class GaveUpError(HeadwayError):
    """Lost too often: whoever is told this does not try again."""


class RestartLimit:
    """Allows `limit` restarts in a row. The row ends when what was restarted has been up for `window_s` seconds: the
    time that a restart takes, which may be long, is no sign of health. `what`: who is restarted, for the error."""

    def __init__(self, limit: int, what: str, window_s: float = 60.0) -> None:
        self.limit = limit
        self.window_s = window_s
        self._what = what
        self._spent = 0
        self._up_s: float | None = None

    def up(self, now: float) -> None:
        """Told when a restart is complete."""
        self._up_s = now

    def spend(self, now: float, why: str) -> None:
        """One restart more. Raises GaveUpError, with the reason of this loss, when that is one too many."""
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
    """Requests that lost KV when what computed them was lost, and how often. What was there at every loss may be their
    cause, however long it takes to do its harm."""

    def __init__(self) -> None:
        self._losses: dict[str, int] = {}

    def lost(self, requests: Iterable[str], live: Iterable[str], limit: int) -> list[str]:
        """Told at each loss who lost KV, and who is live: the live requests that have lost it more than `limit` times,
        which should not be begun again."""
        alive = set(live)
        counted = {name: self._losses.get(name, 0) for name in alive}
        for name in alive.intersection(requests):
            counted[name] += 1
        self._losses = {name: count for name, count in counted.items() if count}
        return sorted(name for name, count in self._losses.items() if count > limit)
