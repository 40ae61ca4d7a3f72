"""Requests that wait for each other's KV blocks for ever: found, so that one of them can be started again.

A request keeps its KV where it was computed until all of it is where it is to be decoded. Two that are to go each
other's way between two full instances both wait for what the other has, and whoever wants to send from there waits
behind them. No instance can see that; who sees all of them can, and needs no limit of time, under which requests that
merely wait for long decodes would suffer too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from headway.control.transfer_queue import TransferQueue
from headway.runtime.cluster.attempt import AttemptTable, RequestAttempt
from headway.runtime.cluster.instance_registry import InstanceRegistry

EVERY_S = 1.0
"""How often to look while anybody waits."""
_SURE_S = 2.0
"""What looks like a knot for so long is one: until then an answer may be on its way."""


def knotted(
    waits: Mapping[str, Collection[int]],
    behind: Mapping[str, Collection[str]],
    holders: Mapping[int, Collection[str]],
) -> set[str]:
    """Those of a set of requests of whom each waits for room on an instance where nobody but them has any, or for a
    sender that one of them keeps: the largest such set. waits: for room on which instances; behind: whom, for senders;
    holders: who has KV on each instance, or goes on there."""
    left = {*waits, *behind}
    while True:
        stuck = {
            name
            for name in left
            if any(left.issuperset({*holders.get(i, ())} - {name}) for i in waits.get(name, ()))
            or not left.isdisjoint(behind.get(name, ()))
        }
        if stuck == left:
            return stuck
        left = stuck


class DeadlockDetector:
    """Finds the requests to start again in one cluster."""

    def __init__(self, fleet: InstanceRegistry, attempts: AttemptTable, transfers: TransferQueue) -> None:
        self._fleet, self._attempts, self._transfers = fleet, attempts, transfers
        self._since: dict[str, float] = {}
        self._done: dict[int, tuple[int, float]] = {}
        self._heard: dict[int, float] = {}

    def heard(self, number: int, now: float) -> None:
        """An instance has sent a snapshot."""
        self._heard[number] = now

    def find(self, now: float, order: Iterable[str]) -> tuple[RequestAttempt, bool] | None:
        """The youngest of a knot, by the `order` of acceptance of what is asked, and whether others go on once it lets
        go of its KV. None: there is no knot. To be asked every `EVERY_S` seconds while anybody waits for room."""
        silent = {each.number for each in self._fleet if now - self._heard.get(each.number, now) > _SURE_S}
        still = self._still(now) - silent
        waits: dict[str, set[int]] = {}
        holders: dict[int, set[str]] = {}
        taken: set[int] = set()
        for attempt in self._attempts:
            name = attempt.request.id
            asked = {i for i, there in attempt.room.items() if not there and i not in silent}
            if asked and attempt.at is None and not attempt.running:
                waits[name] = asked
            places = _places(attempt)
            taken |= places
            for i in places - ({attempt.at} & still):
                holders.setdefault(i, set()).add(name)
        self._since = {name: self._since.get(name, now) for name in waits}
        waits = {  # where nobody has anything, an answer is on its way
            name: asked & taken for name, asked in waits.items() if now - self._since[name] >= _SURE_S
        }
        found = knotted(waits, self._transfers.behind(), holders)
        if not found:
            return None
        wanted: set[str] = set()
        for name in found:
            for i in waits.get(name, ()):
                wanted |= holders.get(i, set()) - {name}
        youngest = {name: age for age, name in enumerate(order)}
        give_way = found & wanted
        attempts = [attempt for attempt in self._attempts if attempt.request.id in (give_way or found)]
        return max(attempts, key=lambda attempt: youngest.get(attempt.asked.submit.id, -1)), bool(give_way)

    def _still(self, now: float) -> set[int]:
        """Instances whose schedulers have computed nothing for a while, and do not: who is there goes on no more than
        others."""
        for each in self._fleet:
            done = each.stats.prefill_tokens_total + each.stats.decode_tokens_total
            goes_on = each.stats.in_flight or each.stats.recovering
            if goes_on or self._done.get(each.number, (-1, now))[0] != done:
                self._done[each.number] = done, now
        return {number for number, (_, since_s) in self._done.items() if now - since_s >= _SURE_S}


def _places(attempt: RequestAttempt) -> set[int]:
    """Where a request has KV, or room for some, or is in a scheduler."""
    found = {*attempt.running, *attempt.spread, *attempt.whole, *(i for i, there in attempt.room.items() if there)}
    if attempt.entry is not None and attempt.runs:
        found.update(attempt.runs[-1].group)
    if attempt.at is not None:
        found.add(attempt.at)
    return found
