"""Whether a span's KV fits on its group: blocks that are free there and not reserved (`KvReservations`).

A run that finds no room keeps its instances waiting, and with them those who would give room back. So a span begins
when there is room for all of its prompt, and the spans of the prompt behind the first one need not ask. What it will
take is promised until the ends of its spans are told.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.control.queue_entries import SpanEntry
from headway.runtime.cluster.instance_registry import InstanceRegistry

_SLACK = 32
"""Tokens more than are needed: of blocks that are not full."""
_WHAT = "prompt"
PATIENCE_S = 60.0
"""A span that has found no room for so long begins all the same: the instances say why it cannot."""


class KvAdmission:
    """Admission of spans by KV, for one cluster."""

    def __init__(self, fleet: InstanceRegistry, clock: Callable[[], float]) -> None:
        self._fleet, self._clock = fleet, clock
        self._since: dict[str, float] = {}

    @property
    def waiting(self) -> bool:
        """Whether a span waits for room."""
        return bool(self._since)

    def fits(self, entry: SpanEntry) -> bool:
        """See `Hands.fits`."""
        if entry.index or entry.resumed:
            return True
        needs: dict[int, int] = {}
        members = _members(entry)
        for member in members:
            for number, tokens in _needs(member).items():
                needs[number] = needs.get(number, 0) + tokens
        if all(self._has(number, tokens) for number, tokens in needs.items()):
            self._since.pop(members[0].owner, None)
            return True
        now = self._clock()
        return now - self._since.setdefault(members[0].owner, now) >= PATIENCE_S

    def _has(self, number: int, tokens: int) -> bool:
        """A pool of which nothing is taken has to do."""
        one = self._fleet.get(number)
        if one is None or (not self._fleet.promises.on(number) and not one.stats.kv_tokens_used):
            return True
        return self._fleet.room(number) >= tokens + _SLACK

    def begun(self, entry: SpanEntry) -> None:
        """A span begins, with those along."""
        for member in _members(entry):
            self._since.pop(member.owner, None)
            if not member.index and not member.resumed:
                for number, tokens in _needs(member).items():
                    self._fleet.promises.make(number, member.owner, _WHAT, tokens)

    def done(self, entry: SpanEntry) -> None:
        """A span is complete: the snapshots of its group show what there is of its KV."""
        for member in _members(entry):
            needs = _needs(member)
            for number in member.group:
                left = 0 if member.last else needs[number] - _share(member.span.end, member)
                self._fleet.promises.kept(number, member.owner, _WHAT, left)

    def forget(self, name: str) -> None:
        """A request has ended."""
        self._since.pop(name, None)
        self._fleet.promises.forget(name)


def _members(entry: SpanEntry) -> list[SpanEntry]:
    """Of a batch those that are left: it goes on without those whose requests have ended, the first one's too."""
    return [member for member in (entry, *entry.along) if not member.journey.ended]


def _share(tokens: int, entry: SpanEntry) -> int:
    return -(-tokens // len(entry.group))


def _needs(entry: SpanEntry) -> dict[int, int]:
    """Tokens of KV of a request that each instance has when its prompt is computed, or has had before: as far as its
    spans are known, and on the last one's group all of it."""
    found: dict[int, int] = {}
    entries = entry.journey.entries or [entry]
    for each in entries:
        end = entry.journey.request.prompt_tokens if each is entries[-1] else each.span.end
        for number in each.group:
            found[number] = max(found.get(number, 0), _share(end, each))
    return found
