"""Room for KV that instances have been asked for, and that their snapshots do not show yet.

Where KV goes is decided by snapshots, ten a second; what was decided since then is counted here. An engine says that it
keeps room, or that a run which takes some has ended, behind a snapshot that shows it: from then on it counts there.
"""

from __future__ import annotations


class Promises:
    """Of one fleet: tokens by instance, request, and what they are for."""

    def __init__(self) -> None:
        self._of: dict[int, dict[tuple[str, str], int]] = {}

    def make(self, number: int, request: str, what: str, tokens: int) -> None:
        """An instance is to find so much room; in place of what it was to find for the same before."""
        self._of.setdefault(number, {})[request, what] = tokens

    def kept(self, number: int, request: str, what: str, left: int = 0) -> None:
        """A snapshot shows it, but for so much. Harmless where nothing was promised."""
        promised = self._of.get(number, {})
        if left > 0 and (request, what) in promised:
            promised[request, what] = left
        else:
            promised.pop((request, what), None)

    def forget(self, request: str, what: str | None = None) -> None:
        """A request needs no more room anywhere, for that or at all."""
        for promised in self._of.values():
            for key in [key for key in promised if key[0] == request and what in (None, key[1])]:
                del promised[key]

    def on(self, number: int) -> int:
        """Tokens that an instance has promised."""
        return sum(self._of.get(number, {}).values())
