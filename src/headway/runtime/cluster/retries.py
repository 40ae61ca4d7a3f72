"""Requests between two attempts: retried at once, after a pause, or when instances can place them; or given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.core.errors import UnavailableError
from headway.runtime.cluster.attempt import RequestAttempt
from headway.runtime.cluster.cluster_request import ClusterRequest

MOST_RUNS_LOST = 16
"""A request whose runs were lost so often, with or without an instance, is given up."""
PAUSE_S = 0.25
"""How long a request waits after a run was lost, unless an instance is known to be gone sooner: peers notice that one
is gone before its process is seen to have ended. Longer, the more often it was lost; at most 5 s."""


class RetryQueue:
    """lost_tokens: that were computed, or being computed, and have to be again."""

    def __init__(self, ring: Callable[[], None], most_losses: int) -> None:
        """ring: called when a pause is over. most_losses: instances that may be lost with a request on them; one more,
        and it is taken to be the cause."""
        self._ring, self._most_losses = ring, most_losses
        self._due: list[ClusterRequest] = []
        self._waiting: dict[str, ClusterRequest] = {}
        self._pausing: dict[str, tuple[ClusterRequest, asyncio.TimerHandle]] = {}
        self.lost_tokens = 0

    def count(self, attempt: RequestAttempt) -> None:
        """An attempt has come to nothing."""
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
        """Nobody could place it."""
        asked.name = ""
        self._waiting[asked.submit.id] = asked

    def release(self, able: bool) -> None:
        """Instances have come or gone; `able`: somebody can place requests."""
        for asked, timer in self._pausing.values():
            timer.cancel()
            self._due.append(asked)
        self._pausing.clear()
        if able:
            self._due += self._waiting.values()
            self._waiting.clear()

    def take(self) -> list[ClusterRequest]:
        """Those whose time has come, once."""
        due, self._due = self._due, []
        return due

    def forget(self, asked: ClusterRequest) -> None:
        """It is over."""
        name = asked.submit.id
        self._waiting.pop(name, None)
        if name in self._pausing:
            self._pausing.pop(name)[1].cancel()

    def lost_with(self, asked: ClusterRequest) -> Exception | None:
        """An instance was lost with it; why it is not tried again."""
        asked.losses += 1
        if asked.losses <= self._most_losses:
            return None
        why = f"{asked.losses} instances were lost with the request on them; it is not tried again"
        return UnavailableError(why, 30.0)

    def given_up(self, asked: ClusterRequest) -> Exception | None:
        """Why it is not tried once more; None: it is."""
        if asked.runs_lost < MOST_RUNS_LOST:
            return None
        return UnavailableError(f"runs of the request were lost {asked.runs_lost} times; try again later", 5.0)

    def close(self) -> None:
        """No pause ends any more."""
        for _, timer in self._pausing.values():
            timer.cancel()

    def _paused(self, name: str) -> None:
        if name in self._pausing:
            self._due.append(self._pausing.pop(name)[0])
            self._ring()
