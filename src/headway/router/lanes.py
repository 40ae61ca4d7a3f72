"""The order of work at one instance: spans that want it to themselves, and requests on their way to its scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Lane:
    """Entries start in order. A span starts when no span runs and, unless beside, nothing runs at all; until its prompt
    is computed, nothing behind it starts. A request only waits for the spans before it (`placement.base.Commit`)."""

    def __init__(self, start: Callable[[str], None]) -> None:
        """`start` is told whose turn it is; it may call back."""
        self._start = start
        self._entries: deque[tuple[str, bool, bool]] = deque()
        self._span: str | None = None
        self._running: set[str] = set()

    def span(self, request: str, beside: bool) -> None:
        """A committed span."""
        self._entries.append((request, True, beside))
        self.pump()

    def door(self, request: str, beside: bool) -> None:
        """A request for the scheduler; `beside`: it does not wait."""
        if beside:
            self._running.add(request)
            self._start(request)
            return
        self._entries.append((request, False, False))
        self.pump()

    def is_span(self, request: str) -> bool:
        """Whether its span runs now."""
        return self._span == request

    def computed(self, request: str) -> None:
        """Its prompt is computed: what is behind a span may start."""
        if self._span == request:
            self._span = None
            self.pump()

    def ended(self, request: str) -> None:
        """It has ended or left, wherever it was."""
        self._running.discard(request)
        if self._span == request:
            self._span = None
        self._entries = deque(entry for entry in self._entries if entry[0] != request)
        self.pump()

    def empty(self) -> list[str]:
        """Who was waiting; nobody is any more."""
        waiting = [request for request, _, _ in self._entries]
        self._entries.clear()
        return waiting

    @property
    def waiting(self) -> int:
        return len(self._entries)

    @property
    def running(self) -> int:
        """Requests that have started and not ended."""
        return len(self._running)

    def pump(self) -> None:
        """Start what may start."""
        while self._entries and self._span is None:
            request, exclusive, beside = self._entries[0]
            if exclusive and not beside and self._running:
                return
            self._entries.popleft()
            self._running.add(request)
            if exclusive:
                self._span = request
            self._start(request)
