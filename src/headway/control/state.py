"""What all parts of a machine share: the book, lanes, requests, news, and what the book has to be told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from headway.control.backend import ActionImpossible, InstanceBackend
from headway.control.instance_queues import InstanceQueues, QueueEntry
from headway.control.queue_entries import SpanEntry
from headway.control.request import ControlledRequest
from headway.control.timeline import FreeTimes
from headway.control.transfer_queue import TransferQueue
from headway.policy.placement.base import Event
from headway.policy.placement.view import ClusterState


class ControllerState:
    """now: as of the last callback. load: requests in the schedulers of each instance; tokens: that wait or run there
    otherwise. closed: instances that take nothing new; gone: that are lost. leaving: requests that have ended, of which
    the policy has not heard yet. touched: where something may begin."""

    def __init__(self, book: ClusterState, hands: InstanceBackend, layers: int, backends: int, order: str) -> None:
        self.book, self.hands, self.layers = book, hands, layers
        count = len(book.instances)
        self.lanes = InstanceQueues(instance.node for instance in book.instances)
        self.timeline = FreeTimes(self.lanes, layers, self._busy_s)
        self.transfers = TransferQueue(backends, order)
        self.journeys: dict[str, ControlledRequest] = {}
        self.news: deque[Event] = deque()
        self.leaving: set[str] = set()
        self.now = 0.0
        self.load = [0] * count
        self.closed: set[int] = set()
        self.gone: set[int] = set()
        self.touched: set[int] = set()
        self._stale: set[int] = set()
        self._several = False
        self.tokens = [0.0] * count

    def _busy_s(self, entry: QueueEntry) -> float:
        return 0.0 if entry.beside else self.hands.busy_s(entry.group)

    # -- what an action names -----------------------------------------------------------------------------------------

    def journey(self, name: str) -> ControlledRequest:
        journey = self.journeys.get(name)
        if journey is None:
            raise ActionImpossible(f"there is no request {name}")
        return journey

    def group(self, group: Iterable[int], journey: ControlledRequest | None = None) -> tuple[int, ...]:
        """A group in the order of its acquisition. `journey`: whose it is to be; an instance that is closed takes only
        what it has already."""
        known = len(self.load)
        for i in group:
            if not 0 <= i < known:
                raise ActionImpossible(f"there is no instance {i}")
        chosen = self.lanes.ordered(group)
        if not chosen:
            raise ActionImpossible("a group needs an instance")
        if self.gone or self.closed:
            self._check_open(chosen, journey)
        return chosen

    def _check_open(self, group: tuple[int, ...], journey: ControlledRequest | None) -> None:
        for i in group:
            if i in self.gone:
                raise ActionImpossible(f"instance {i} is gone")
            if i in self.closed and (journey is None or i not in self.places(journey)):
                raise ActionImpossible(f"instance {i} takes nothing new")

    def places(self, journey: ControlledRequest) -> set[int]:
        """Instances that a request needs as it is now: for its KV, a turn, pieces under way, or what it holds."""
        name = journey.request.id
        held = {i for i, holder in enumerate(self.lanes.holder) if holder == name}
        waiting = (entry for lane in self.lanes.waiting for entry in lane if entry.kind == "hold")
        asked = {i for entry in waiting if entry.owner == name for i in entry.group}
        return journey.places() | self.transfers.ends(name) | held | asked

    def everywhere(self) -> dict[str, set[int]]:
        """`places` of all requests."""
        found = {name: journey.places() for name, journey in self.journeys.items()}
        others = [*self.transfers.all_ends(), *((name, i) for i, name in enumerate(self.lanes.holder))]
        for lane in self.lanes.waiting:
            others += ((entry.owner, i) for entry in lane if entry.kind == "hold" for i in entry.group)
        for name, i in others:
            if name in found:
                found[name].add(i)
        return found

    # -- what has changed ---------------------------------------------------------------------------------------------

    def touch(self, group: Iterable[int]) -> None:
        """Something has changed there: something may begin, and the book must be told."""
        self.touched.update(group)
        self._stale.update(group)

    def anew(self) -> None:
        """Predictions were wrong, or something left its place."""
        if not self._several:
            self._stale.update(self.timeline.anew(self.now))

    @contextmanager
    def once(self) -> Iterator[None]:
        """Many things leave their places, and nothing begins meanwhile."""
        self._several = True
        try:
            yield
        finally:
            self._several = False
        self.anew()

    def count(self, group: tuple[int, ...], tokens: int) -> None:
        """So many tokens more (or fewer) wait or run on a group, besides those in schedulers."""
        share = tokens / len(group)
        for i in group:
            self.tokens[i] += share

    def uncount(self, entry: SpanEntry) -> None:
        """A span's tokens no longer wait or run."""
        share = (entry.span.end - entry.span.start) / len(entry.group)
        for i in entry.group:
            self.tokens[i] -= share

    def flush(self) -> None:
        """Bring the book up to date."""
        if not self._stale:
            return
        book, refresh, free_s, holders = self.book, self.hands.refresh, self.timeline.free_s, self.lanes.holder
        for i in sorted(self._stale - self.gone):
            known, figures = book.instances[i], refresh(i)
            free_at_s = max(figures.free_at_s, free_s[i])
            queued, used = round(self.tokens[i] + figures.queued), figures.used
            running, holder = figures.running, holders[i]
            if (
                free_at_s != known.free_at_s
                or queued != known.queued
                or used != known.used
                or running != known.running
                or holder != known.holder
            ):
                book.put(
                    msgspec.structs.replace(
                        known, free_at_s=free_at_s, queued=queued, used=used, running=running, holder=holder
                    )
                )
        self._stale.clear()

    def join(self, node: int) -> None:
        """One more instance, with the next id."""
        self.lanes.join(node)
        self.timeline.free_s.append(0.0)
        self.load.append(0)
        self.tokens.append(0.0)
