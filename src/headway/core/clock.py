"""Time is an argument; whoever needs to *ask* for it takes a `ClockProtocol`.

Only the live engine and the server hold a real clock. Policies, ledgers and latency models never see one.
"""

from __future__ import annotations

from typing import Protocol


class ClockProtocol(Protocol):
    """Seconds on an absolute, monotonic axis."""

    def now(self) -> float:
        """The current time in seconds. Never falls."""


class ManualClock:
    """A clock that moves only when told: for tests and the simulator."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward; raises ValueError on a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
