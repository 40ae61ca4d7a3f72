"""KV reservations on instances that their snapshots do not show yet.

KV targets are chosen by snapshots, ten per second; decisions since the last one are counted here. An engine sends a
snapshot before `KvReserved` and before `SpanTaskDone` of a span that took blocks: from then on the snapshot counts.
"""

from __future__ import annotations

from collections import Counter


class KvReservations:
    """Reserved tokens by instance, request and purpose."""

    def __init__(self) -> None:
        self._of: dict[str, dict[tuple[int, str], int]] = {}
        self._on: Counter[int] = Counter()

    def make(self, number: int, request: str, what: str, tokens: int) -> None:
        """Reserve tokens on an instance for a request and a purpose, in place of an earlier reservation of the two."""
        self.kept(number, request, what)
        self._of.setdefault(request, {})[number, what] = tokens
        self._on[number] += tokens

    def kept(self, number: int, request: str, what: str, left: int = 0) -> None:
        """Release a reservation that a snapshot shows now, but for `left` tokens. Harmless without a reservation."""
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
        """Release a request's reservations on all instances, for one purpose or (None) for all."""
        for number, each in list(self._of.get(request, ())):
            if what in (None, each):
                self.kept(number, request, each)

    def on(self, number: int) -> int:
        """Return the tokens reserved on an instance."""
        return self._on[number]
