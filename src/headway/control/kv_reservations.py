"""The one account of KV room on instances: what they report as used, and what is reserved and not reported yet.

Live and simulated clusters decide by it. A live instance's report is its snapshot, ten per second; reservations count
from the decision until a snapshot shows their blocks. An engine sends a snapshot before `KvReserved` and before
`SpanTaskDone` of a span that took blocks: from then on the snapshot counts. A simulated instance reports at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

KvLoad = tuple[int, int]
"""KV tokens of an instance in all, and those in use."""


class KvReservations:
    """Reserved tokens by instance, request and purpose, beside what the instances report."""

    def __init__(self, load: Callable[[int], KvLoad | None] = lambda number: (0, 0)) -> None:
        """load: what an instance reports; None: it is gone."""
        self._load = load
        self._of: dict[str, dict[tuple[int, str], int]] = {}
        self._on: Counter[int] = Counter()

    def make(self, number: int, request: str, what: str, tokens: int) -> None:
        """Reserve tokens on an instance for a request and a purpose, in place of an earlier reservation of the two."""
        self.kept(number, request, what)
        self._of.setdefault(request, {})[number, what] = tokens
        self._on[number] += tokens

    def kept(self, number: int, request: str, what: str, left: int = 0) -> None:
        """Release a reservation that the instance reports as used now, but for `left` tokens. Harmless without one."""
        reserved = self._of.get(request, {})
        tokens = reserved.pop((number, what), None)
        if tokens is None:
            return
        self._on[number] -= tokens
        if left > 0:
            reserved[number, what] = left
            self._on[number] += left
        elif not reserved:
            del self._of[request]

    def forget(self, request: str, what: str | None = None) -> None:
        """Release a request's reservations on all instances, for one purpose or (None) for all."""
        for number, each in list(self._of.get(request, ())):
            if what in (None, each):
                self.kept(number, request, each)

    def on(self, number: int) -> int:
        """Return the tokens reserved on an instance."""
        return self._on[number]

    def free(self, number: int) -> int:
        """Return the tokens that are free on an instance by its last report; 0 on one that is gone."""
        total, used = self._load(number) or (0, 0)
        return total - used

    def room(self, number: int) -> int:
        """Return the tokens that are free on an instance and not reserved."""
        return self.free(number) - self._on[number]

    def roomiest(self, group: Iterable[int]) -> int:
        """Return the instance with the most room; of equals the first."""
        return max(sorted(group), key=self.room)

    def has(self, number: int, tokens: int) -> bool:
        """Return whether an instance has so much room. An empty pool counts as enough, and an instance that is gone:
        waiting would not help."""
        load = self._load(number)
        return load is None or (not self._on[number] and not load[1]) or self.room(number) >= tokens
