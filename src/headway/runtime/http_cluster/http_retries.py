"""Attempts that follow a refusal, a loss or a failed placement: each after a pause, and up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.core.errors import OverloadedError, UnavailableError
from headway.runtime.http_cluster.http_request import HttpRequest
from headway.runtime.http_cluster.http_server import ServerBusyError

_MOST_LOSSES = 6
"""Attempts that may be lost; with one more the request counts as the cause."""
_MOST_REFUSALS = 4
"""Refusals of a request that has no output, for each instance, before its client gets 429."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
"""Seconds before another attempt after a loss, unless its instance is known to be gone; doubled with each."""


class HttpRetries:
    """Counts a request's failed attempts, and begins the next ones."""

    def __init__(
        self,
        instances: int,
        place: Callable[[HttpRequest], None],
        drop: Callable[[HttpRequest, str], None],
        settle: Callable[[], None],
    ) -> None:
        """instances: of the cluster. place: begins another attempt. drop: takes the one under way from the controller.
        settle: called after an attempt that began by itself, at the end of its pause."""
        self._most_refusals = _MOST_REFUSALS * max(1, instances)
        self._place, self._drop, self._settle = place, drop, settle
        self._homeless: list[HttpRequest] = []
        self._timers: set[asyncio.TimerHandle] = set()
        self.total = 0
        """Attempts that followed another one."""

    def wait(self, request: HttpRequest) -> None:
        """Keep a request until `release`: no instance is ready."""
        self._homeless.append(request)

    def release(self) -> None:
        """Place the requests that wait for an instance."""
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            if not request.life.over:
                self._place(request)

    def again(self, request: HttpRequest, why: str, after_s: float = 0.0) -> None:
        """Begin another attempt after a pause."""

        def due() -> None:
            self._timers.discard(timer)
            if not request.life.over:
                self._place(request)
                self._settle()

        self._drop(request, why)
        self.total += 1
        timer = asyncio.get_running_loop().call_later(after_s, due)
        self._timers.add(timer)

    # Each of these returns the error of a request that is not tried again.

    def refused(self, request: HttpRequest, error: ServerBusyError) -> Exception | None:
        """Try again when the instance said: it is too busy."""
        request.life.refuse()
        if request.life.refusals >= self._most_refusals and not request.life.output:
            return OverloadedError(f"all instances are busy: {error}", error.retry_after_s)
        self.again(request, str(error), error.retry_after_s)
        return None

    def lost(self, request: HttpRequest, known: bool) -> Exception | None:
        """Try again: the stream broke off. known: its instance is known to be lost, so that there is no pause."""
        after_s = 0.0 if known else min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0**request.life.losses)
        request.life.lose()
        if request.life.losses > _MOST_LOSSES:
            why = f"{request.life.losses} attempts at the request were lost; it is not tried again"
            return UnavailableError(why, 30.0)
        self.again(request, "its instance is gone", after_s)
        return None

    def stranded(self, request: HttpRequest) -> Exception | None:
        """Try again after a pause: no instance was chosen though there is one."""
        request.stranded += 1
        if request.stranded > _MOST_LOSSES:
            return UnavailableError("no instance can be chosen for the request; see the log", 5.0)
        self.again(request, "its placement failed", _PAUSE_S * request.stranded)
        return None

    def close(self) -> None:
        """Cancel all pauses."""
        for timer in self._timers:
            timer.cancel()
