"""Lets a `ClusterController` act until nothing is pending, and again at the time that its policy asks for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from headway.control.controller import ClusterController

log = logging.getLogger("headway.cluster")

TRY_AGAIN_S = 1.0
"""Seconds until another try after settling has failed."""


class SettlingLoop:
    """One per controller, on its event loop: holds the one timer of the policy's next wake-up."""

    def __init__(
        self,
        machine: ClusterController,
        working: Callable[[], Iterable[int]],
        follow: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """working: returns the instances with uncomputed prompt tokens. follow: reports back what came up inside calls
        of the controller, which is not re-entrant, and returns whether there was any. clock: seconds, of the event
        loop's clock."""
        self._machine, self._working, self._follow, self._clock = machine, working, follow, clock
        self._alarm: asyncio.TimerHandle | None = None
        self._settling = False

    def settle(self) -> None:
        """Let the controller act on all pending events. Called again from inside, it does nothing: the outer call goes
        round until nothing is pending.

        Raises nothing: an error is attributed to no request, and settling is tried again, at once and then after
        `TRY_AGAIN_S`.
        """
        if self._settling:
            return
        # The event that raised is usually consumed by then: a second try handles the rest.
        for _ in range(2):
            self._settling = True
            try:
                # To a fixed point: what `follow` reports back to the controller can make further actions possible.
                while True:
                    now = self._clock()
                    # Remaining prefill time shrinks with the clock, not with an event: before policies look.
                    self._machine.changed(self._working(), now)
                    wake_s = self._machine.settle(now)
                    if not self._follow():
                        break
            except Exception:
                log.exception("the controller has failed at the consequences of an event")
                continue
            finally:
                self._settling = False
            # One timer at most: the newest wake-up time replaces the one before, also where it is later.
            self.close()
            if wake_s is not None:
                self._set_alarm(wake_s - self._clock(), partial(self._wake, wake_s))
            return
        self._set_alarm(TRY_AGAIN_S, self.settle)

    def close(self) -> None:
        """Cancel the timer."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _set_alarm(self, delay_s: float, act: Callable[[], None]) -> None:
        self.close()
        self._alarm = asyncio.get_running_loop().call_later(max(0.0, delay_s), act)

    def _wake(self, at_s: float) -> None:
        self._alarm = None
        try:
            # The timer may fire a clock tick early: a policy must not see a time before the one that it named.
            self._machine.woken(max(at_s, self._clock()))
        except Exception:
            log.exception("the controller has failed at waking its policies")
        self.settle()
