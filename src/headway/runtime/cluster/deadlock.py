"""Detection of requests that wait for each other's KV blocks for ever, so that one of them can be restarted.

A request keeps its KV where it was computed until all of it has arrived where it is decoded. Two requests that migrate
in opposite directions between two full instances both wait for the other's blocks, and every other slice of those
senders waits behind them. No instance can see that; the controller sees all of them, and needs no timeout, which would
also hit requests that merely wait for long decodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from headway.control.transfer_queue import TransferQueue
from headway.runtime.cluster.attempt import AttemptTable, RequestAttempt
from headway.runtime.cluster.instance_registry import InstanceRegistry

EVERY_S = 1.0
"""Seconds between two searches while a request waits for blocks."""
_SURE_S = 2.0
"""Seconds for which a request must have waited to count as blocked: until then an answer may be on its way."""


def knotted(
    waits: Mapping[str, Collection[int]],
    behind: Mapping[str, Collection[str]],
    holders: Mapping[int, Collection[str]],
) -> set[str]:
    """Return the largest set of deadlocked requests.

    Each of them waits for KV blocks on an instance whose blocks are all held by members of the set, or for a sender
    that a member occupies. waits: the instances on which a request waits for blocks. behind: the requests behind whose
    slices a request waits. holders: the requests that hold KV, or make progress, on each instance.
    """
    # Greatest fixed point: begin with all that wait, and remove those that a request outside the set can free.
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
    """Finds the request to restart in one cluster."""

    def __init__(self, fleet: InstanceRegistry, attempts: AttemptTable, transfers: TransferQueue) -> None:
        self._fleet, self._attempts, self._transfers = fleet, attempts, transfers
        self._since: dict[str, float] = {}
        self._done: dict[int, tuple[int, float]] = {}
        self._heard: dict[int, float] = {}

    def heard(self, number: int, now: float) -> None:
        """Note the time of an instance's last snapshot."""
        self._heard[number] = now

    def find(self, now: float, order: Iterable[str]) -> tuple[RequestAttempt, bool] | None:
        """Return the youngest deadlocked request, and whether its restart lets others continue; None without deadlock.

        order: ids of the accepted requests, oldest first. Called every `EVERY_S` seconds while a request waits for
        blocks.
        """
        # A silent instance may be inside a long iteration, with its answers still to come.
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
            # On a working scheduler the request will free its blocks, which breaks a deadlock; on a still one not.
            for i in places - ({attempt.at} & still):
                holders.setdefault(i, set()).add(name)
        self._since = {name: self._since.get(name, now) for name in waits}
        # On an instance without any KV the reservation cannot be blocked: its answer is on its way.
        waits = {name: asked & taken for name, asked in waits.items() if now - self._since[name] >= _SURE_S}
        found = knotted(waits, self._transfers.behind(), holders)
        if not found:
            return None
        wanted: set[str] = set()
        for name in found:
            for i in waits.get(name, ()):
                wanted |= holders.get(i, set()) - {name}
        # Preferably a request whose blocks another member waits for: only its restart lets that one continue.
        youngest = {name: age for age, name in enumerate(order)}
        give_way = found & wanted
        attempts = [attempt for attempt in self._attempts if attempt.request.id in (give_way or found)]
        return max(attempts, key=lambda attempt: youngest.get(attempt.asked.submit.id, -1)), bool(give_way)

    def _still(self, now: float) -> set[int]:
        """Return the instances whose schedulers have computed nothing for `_SURE_S` and have nothing in flight.

        Requests resident there make no progress.
        """
        for each in self._fleet:
            done = each.stats.prefill_tokens_total + each.stats.decode_tokens_total
            goes_on = each.stats.in_flight or each.stats.recovering
            if goes_on or self._done.get(each.number, (-1, now))[0] != done:
                self._done[each.number] = done, now
        return {number for number, (_, since_s) in self._done.items() if now - since_s >= _SURE_S}


def _places(attempt: RequestAttempt) -> set[int]:
    """Return the instances where a request has KV, has blocks reserved, or is resident on the scheduler."""
    found = {*attempt.running, *attempt.spread, *attempt.whole, *(i for i, there in attempt.room.items() if there)}
    if attempt.entry is not None and attempt.runs:
        found.update(attempt.runs[-1].group)
    if attempt.at is not None:
        found.add(attempt.at)
    return found
