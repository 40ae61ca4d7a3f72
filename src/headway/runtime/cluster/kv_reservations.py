"""KV reservations on instances that their snapshots do not show yet.

Where KV goes is decided by snapshots, ten a second; what was decided since then is counted here. An engine says that it
keeps room, or that a run which takes some has ended, behind a snapshot that shows it: from then on it counts there.
"""

from __future__ import annotations

from collections import Counter


class KvReservations:
    """Reserved tokens by instance, request and purpose."""

    def __init__(self) -> None:
        self._of: dict[str, dict[tuple[int, str], int]] = {}
        self._on: Counter[int] = Counter()

    def make(self, number: int, request: str, what: str, tokens: int) -> None:
        """An instance is to find so much room; in place of what it was to find for the same before."""
        self.kept(number, request, what)
        self._of.setdefault(request, {})[number, what] = tokens
        self._on[number] += tokens

    def kept(self, number: int, request: str, what: str, left: int = 0) -> None:
        """A snapshot shows it, but for so much. Harmless where nothing was promised."""
        promised = self._of.get(request, {})
        tokens = promised.pop((number, what), None)
        if tokens is None:
            return
        self._on[number] -= tokens
        if left > 0:
            promised[number, what] = left
            self._on[number] += left
        elif not promised:
            del self._of[request]

    def forget(self, request: str, what: str | None = None) -> None:
        """A request needs no more room anywhere, for that or at all."""
        for number, each in list(self._of.get(request, ())):
            if what in (None, each):
                self.kept(number, request, each)

    def on(self, number: int) -> int:
        """Tokens that an instance has promised."""
        return self._on[number]
