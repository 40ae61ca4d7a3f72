"""Calls at given times, from one thread."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

from headway.core.batch import ClockProtocol


class TimedCalls:
    """Times are the clock's."""

    def __init__(self, clock: ClockProtocol) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._wakes = threading.Condition()
        threading.Thread(target=self._run, name="alarm", daemon=True).start()

    def at(self, due_s: float, call: Callable[[], None]) -> None:
        """`call` in the alarm's thread at that time, or at once where it has passed. It must not block."""
        with self._wakes:
            self._serial += 1
            heapq.heappush(self._due, (due_s, self._serial, call))
            self._wakes.notify()

    def _run(self) -> None:
        while True:
            with self._wakes:
                while not self._due or self._due[0][0] > self._clock.now():
                    self._wakes.wait(self._due[0][0] - self._clock.now() if self._due else None)
                call = heapq.heappop(self._due)[2]
            call()
