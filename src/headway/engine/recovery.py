"""How often is it worth beginning again? Whatever dies over and over dies of a cause that a restart does not remove."""

from __future__ import annotations

from collections import deque

from headway.core.errors import HeadwayError


class GaveUpError(HeadwayError):
    """Lost too often: whoever is told this does not try again."""


class Restarts:
    """Allows `limit` restarts in any `window_s` seconds. `what`: who is restarted, for the error."""

    def __init__(self, limit: int, what: str, window_s: float = 60.0) -> None:
        self.limit = limit
        self.window_s = window_s
        self._what = what
        self._spent: deque[float] = deque()

    def spend(self, now: float, why: str) -> None:
        """One restart more. Raises GaveUpError, with the reason of this loss, when that is one too many."""
        while self._spent and now - self._spent[0] >= self.window_s:
            self._spent.popleft()
        if len(self._spent) >= self.limit:
            raise GaveUpError(
                f"{why}; {self._what} started again {self.limit} times within {self.window_s:g} s, which is the limit"
            )
        self._spent.append(now)
