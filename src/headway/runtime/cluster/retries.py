"""Requests between two attempts: retried at once, after a pause, or when instances can place them; or given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.core.errors import UnavailableError
from headway.runtime.cluster.attempt import RequestAttempt
from headway.runtime.cluster.cluster_request import ClusterRequest

MOST_RUNS_LOST = 16
"""Lost tasks, with or without an instance, after which a request is given up."""
PAUSE_S = 0.25
"""Seconds that a request waits after its first lost task, unless membership changes sooner: peers notice a loss before
the end of the process is seen. Doubled with each further loss, up to 5 s."""


class RetryQueue:
    """Requests between two attempts."""

    def __init__(self, ring: Callable[[], None], most_losses: int) -> None:
        """ring: called when a pause is over. most_losses: instances that may be lost with a request on them; with one
        more it counts as the cause."""
        self._ring, self._most_losses = ring, most_losses
        self._due: list[ClusterRequest] = []
        self._waiting: dict[str, ClusterRequest] = {}
        self._pausing: dict[str, tuple[ClusterRequest, asyncio.TimerHandle]] = {}
        self.lost_tokens = 0
        """Tokens whose KV was lost and has to be computed again."""

    def count(self, attempt: RequestAttempt) -> None:
        """Count the tokens of a failed attempt."""
        # One that never began has lost nothing.
        if attempt.runs or attempt.at is not None:
            self.lost_tokens += attempt.kv_tokens

    def soon(self, asked: ClusterRequest) -> None:
        """Try again at once."""
        self._due.append(asked)

    def later(self, asked: ClusterRequest) -> None:
        """Try again when instances have come or gone, or after a pause."""
        asked.runs_lost += 1
        pause_s = min(5.0, PAUSE_S * 2.0 ** (asked.runs_lost - 1))
        timer = asyncio.get_running_loop().call_later(pause_s, self._paused, asked.submit.id)
        self._pausing[asked.submit.id] = asked, timer

    def wait(self, asked: ClusterRequest) -> None:
        """Keep a request until the cluster can place requests again."""
        asked.name = ""
        self._waiting[asked.submit.id] = asked

    def release(self, able: bool) -> None:
        """End all pauses after a change of membership. able: requests can be placed; end the other waits too."""
        # A lost instance is known now: a pause had only been waiting for that.
        for asked, timer in self._pausing.values():
            timer.cancel()
            self._due.append(asked)
        self._pausing.clear()
        if able:
            self._due += self._waiting.values()
            self._waiting.clear()

    def take(self) -> list[ClusterRequest]:
        """Return the requests that are due, each once."""
        due, self._due = self._due, []
        return due

    def forget(self, asked: ClusterRequest) -> None:
        """Drop a request that has ended."""
        name = asked.submit.id
        self._waiting.pop(name, None)
        if name in self._pausing:
            self._pausing.pop(name)[1].cancel()

    def lost_with(self, asked: ClusterRequest) -> Exception | None:
        """Count an instance that was lost with a request on it; return the error if that was one too many."""
        asked.losses += 1
        if asked.losses <= self._most_losses:
            return None
        why = f"{asked.losses} instances were lost with the request on them; it is not tried again"
        return UnavailableError(why, 30.0)

    def given_up(self, asked: ClusterRequest) -> Exception | None:
        """Return the error of a request that lost too many tasks; None: it may be tried again."""
        if asked.runs_lost < MOST_RUNS_LOST:
            return None
        return UnavailableError(f"runs of the request were lost {asked.runs_lost} times; try again later", 5.0)

    def close(self) -> None:
        """Cancel all timers."""
        for _, timer in self._pausing.values():
            timer.cancel()

    def _paused(self, name: str) -> None:
        if name in self._pausing:
            self._due.append(self._pausing.pop(name)[0])
            self._ring()
