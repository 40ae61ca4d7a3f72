"""Protocol of clocks. Functions take times as arguments; a component that must read one takes a `ClockProtocol`.

Only the live engine and the server hold a real clock. Policies, block managers and latency models never do.
"""

from __future__ import annotations

from typing import Protocol


class ClockProtocol(Protocol):
    """Seconds on an absolute, monotonic axis."""

    def now(self) -> float:
        """The current time in seconds. Never falls."""


class ManualClock:
    """Clock that `advance` moves: for tests and the simulator."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward; raises ValueError on a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
