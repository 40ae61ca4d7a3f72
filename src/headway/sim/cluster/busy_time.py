"""How long each simulated instance had something to compute: a span, or a batch of its scheduler."""

from __future__ import annotations

from collections.abc import Iterable


class InstanceBusyTime:
    """Busy seconds of each instance, which may have several spans and batches at once."""

    def __init__(self, instances: int) -> None:
        self.seconds = [0.0] * instances
        """Of each instance, as of its last pause; `close` adds the time since."""
        # Spans and batches that run, by instance, and the time since which there is at least one.
        self._running = [0] * instances
        self._since_s = [0.0] * instances

    def begin(self, group: Iterable[int], now: float) -> None:
        """Count a span or a batch that begins on the instances of a group."""
        for i in group:
            if not self._running[i]:
                self._since_s[i] = now
            self._running[i] += 1

    def end(self, group: Iterable[int], now: float) -> None:
        """Count the end of a span or a batch on the instances of a group."""
        for i in group:
            self._running[i] -= 1
            if not self._running[i]:
                self.seconds[i] += now - self._since_s[i]

    def close(self, now: float) -> None:
        """Add the busy time of spans and batches that still run; called once, at the end of a run."""
        for i, running in enumerate(self._running):
            if running:
                self.seconds[i] += now - self._since_s[i]
                self._since_s[i] = now
