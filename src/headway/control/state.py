"""State shared by the parts of `ClusterController`: cluster state, instance queues, requests and pending events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from headway.control.backend import ActionImpossible, InstanceBackend
from headway.control.entries import ControlledRequest, FreeTimes, InstanceQueues, QueueEntry, SpanEntry, TransferQueue
from headway.policy.placement.contract import ClusterState, Event


class ControllerState:
    """Mutable state of one `ClusterController`. Lists are by instance id and grow with `join`."""

    def __init__(
        self, cluster: ClusterState, backend: InstanceBackend, layers: int, receive_backends: int, order: str
    ) -> None:
        self.cluster, self.backend, self.layers = cluster, backend, layers
        count = len(cluster.instances)
        self.queues = InstanceQueues(instance.node for instance in cluster.instances)
        self.timeline = FreeTimes(self.queues, layers, self._busy_s)
        self.transfers = TransferQueue(receive_backends, order)
        # requests that have arrived and not ended, by id, in order of arrival
        self.requests: dict[str, ControlledRequest] = {}
        # events that the policy has not received
        self.pending_events: deque[Event] = deque()
        # requests that have ended, while their last event is pending: the policy may still name them
        self.ending: set[str] = set()
        # time of the last callback, in seconds
        self.now = 0.0
        # requests in the schedulers of each instance; exclusive spans wait until it is 0
        self.residents = [0] * count
        # instances that are drained and take no new requests
        self.closed: set[int] = set()
        # lost instances
        self.gone: set[int] = set()
        # instances where an entry may have become ready since the last scan of the queues
        self.touched: set[int] = set()
        # instances whose entry in the cluster state is out of date
        self._stale: set[int] = set()
        # inside `single_relayout`: the time line is laid out at its end, not after each removal
        self._relayout_deferred = False
        # prompt tokens queued or running on each instance outside its schedulers: each span's, over its group's size
        self.tokens = [0.0] * count

    def _busy_s(self, entry: QueueEntry) -> float:
        return 0.0 if entry.concurrent else self.backend.busy_s(entry.group)

    # -- what an action names -----------------------------------------------------------------------------------------

    def request(self, name: str) -> ControlledRequest:
        """Return the state of a request by its id. Raises ActionImpossible if it has ended or never arrived."""
        controlled = self.requests.get(name)
        if controlled is None:
            raise ActionImpossible(f"there is no request {name}")
        return controlled

    def group(self, group: Iterable[int], controlled: ControlledRequest | None = None) -> tuple[int, ...]:
        """Return a group in the order of its acquisition. `controlled`: the request that will use it; a closed instance
        is accepted only if the request is there already. Raises ActionImpossible."""
        known = len(self.residents)
        for i in group:
            if not 0 <= i < known:
                raise ActionImpossible(f"there is no instance {i}")
        chosen = self.queues.ordered(group)
        if not chosen:
            raise ActionImpossible("a group needs an instance")
        if self.gone or self.closed:
            self._check_open(chosen, controlled)
        return chosen

    def _check_open(self, group: tuple[int, ...], controlled: ControlledRequest | None) -> None:
        for i in group:
            if i in self.gone:
                raise ActionImpossible(f"instance {i} is gone")
            if i in self.closed and (controlled is None or i not in self.places(controlled)):
                raise ActionImpossible(f"instance {i} takes nothing new")

    def places(self, controlled: ControlledRequest) -> set[int]:
        """Return the instances that a request depends on: its KV, queue entries, KV slices under way, reservations."""
        name = controlled.request.id
        held = {i for i, holder in enumerate(self.queues.holder) if holder == name}
        waiting = (entry for queue in self.queues.waiting for entry in queue if entry.kind == "hold")
        asked = {i for entry in waiting if entry.owner == name for i in entry.group}
        return controlled.places() | self.transfers.ends(name) | held | asked

    def everywhere(self) -> dict[str, set[int]]:
        """Return `places` of all requests, by id, in order of arrival: one pass over the queues instead of one each."""
        found = {name: controlled.places() for name, controlled in self.requests.items()}
        others = [*self.transfers.all_ends(), *((name, i) for i, name in enumerate(self.queues.holder))]
        for queue in self.queues.waiting:
            others += ((entry.owner, i) for entry in queue if entry.kind == "hold" for i in entry.group)
        for name, i in others:
            if name in found:
                found[name].add(i)
        return found

    # -- what has changed ---------------------------------------------------------------------------------------------

    def touch(self, group: Iterable[int]) -> None:
        """Mark instances as changed: their queues are scanned for ready entries, their cluster state is refreshed."""
        self.touched.update(group)
        self._stale.update(group)

    def relayout(self) -> None:
        """Lay out the time line again, after a wrong prediction or when an entry has left its place in a queue."""
        if not self._relayout_deferred:
            self._stale.update(self.timeline.relayout(self.now))

    @contextmanager
    def single_relayout(self) -> Iterator[None]:
        """Context for the removal of many entries: one new layout of the time line at its end. No entry may begin in
        it."""
        self._relayout_deferred = True
        try:
            yield
        finally:
            self._relayout_deferred = False
        self.relayout()

    def add_tokens(self, group: tuple[int, ...], tokens: int) -> None:
        """Add `tokens` (negative: subtract) to those queued or running on a group outside its schedulers."""
        share = tokens / len(group)
        for i in group:
            self.tokens[i] += share

    def subtract_tokens(self, entry: SpanEntry) -> None:
        """Subtract a span's tokens, once it is complete or has left the queues."""
        share = (entry.span.end - entry.span.start) / len(entry.group)
        for i in entry.group:
            self.tokens[i] -= share

    def flush(self) -> None:
        """Bring the cluster state up to date. Called before every call of the policy."""
        if not self._stale:
            return
        cluster, refresh, free_s, holders = self.cluster, self.backend.refresh, self.timeline.free_s, self.queues.holder
        # sorted: the backend is queried in a reproducible order, as the replay of a log needs
        for i in sorted(self._stale - self.gone):
            known, figures = cluster.instances[i], refresh(i)
            # free when both the schedulers' prefills and the queued spans have ended
            free_at_s = max(figures.free_at_s, free_s[i])
            queued, used = round(self.tokens[i] + figures.queued), figures.used
            running, holder = figures.running, holders[i]
            if (
                # compare first: most refreshes change nothing, and a new version makes pending commits stale
                free_at_s != known.free_at_s
                or queued != known.queued
                or used != known.used
                or running != known.running
                or holder != known.holder
            ):
                cluster.put(
                    msgspec.structs.replace(
                        known, free_at_s=free_at_s, queued=queued, used=used, running=running, holder=holder
                    )
                )
        self._stale.clear()

    def join(self, node: int) -> None:
        """Add an instance, with the next id, on a node."""
        self.queues.join(node)
        self.timeline.free_s.append(0.0)
        self.residents.append(0)
        self.tokens.append(0.0)
