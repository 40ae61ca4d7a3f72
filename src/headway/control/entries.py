"""Queues of the instances: one total order over spans, reservations and requests on their way to a scheduler, the
transfers between instances, and the predicted times at which instances will be free.

Every entry (a span, a reservation, or a request on its way to a scheduler) has a rank, and waits in the queue of every
instance of its group, in order of rank. It may begin when it is first in all of its queues at once. Because the order
is the same on all instances, an entry waits only for lower ranks or for a running span that will end: waits form no
cycle. Instances are acquired in order of (node, id), all in one step.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, Literal

from headway.core.errors import InvariantError
from headway.core.request import Phase, Request, Span
from headway.policy.placement.contract import CachedPrefix, SpanProgress

Kind = Literal["span", "hold", "scheduler"]
State = Literal["waiting", "running", "unqueued", "done"]


class QueueEntry:
    """An entry in the queues of a group of instances."""

    __slots__ = ("after", "concurrent", "group", "kind", "owner", "planned_s", "rank", "ready_s", "state")

    def __init__(
        self,
        kind: Kind,
        owner: str,
        group: tuple[int, ...],
        after: QueueEntry | None = None,
        concurrent: bool = False,
    ) -> None:
        # kind: "span", "hold" (reservation) or "scheduler" (request on its way to a scheduler). owner: id of the
        # request, or the reservation's holder. group: in order of acquisition.
        self.kind, self.owner, self.group = kind, owner, group
        # after: entry that must be done first, the request's previous span. beside: runs concurrently with
        # requests in schedulers
        self.after, self.concurrent = after, concurrent
        # place in the total order; set when the entry is queued
        self.rank = 0
        self.state: State = "unqueued"
        # absolute time from which on it may compute: when the cached KV before it has been copied to its group
        self.ready_s = 0.0
        # predicted absolute time of its end, in seconds (`FreeTimes`)
        self.planned_s = 0.0

    def __lt__(self, other: QueueEntry) -> bool:
        return self.rank < other.rank

    def remaining_s(self, layers: int) -> float:
        """Return the predicted seconds from its (next) start to its end; `layers`: of the model."""
        return 0.0


class InstanceQueues:
    """The queue, the running span and the reservation of each instance. Independent of time."""

    def __init__(self, nodes: Iterable[int]) -> None:
        """`nodes`: the node of each instance, by id."""
        self.nodes = list(nodes)
        # waiting entries of each instance, by rank
        self.waiting: list[list[QueueEntry]] = [[] for _ in self.nodes]
        # the span that computes on each instance
        self.running: list[QueueEntry | None] = [None] * len(self.nodes)
        # the holder that each instance is reserved for
        self.holder: list[str | None] = [None] * len(self.nodes)
        # highest and lowest rank given so far: appended entries count up, pushed ones count down from 0
        self._last = 0
        self._first = 0

    def join(self, node: int) -> None:
        """Add an instance, with the next id, on a node."""
        self.nodes.append(node)
        self.waiting.append([])
        self.running.append(None)
        self.holder.append(None)

    def ordered(self, group: Iterable[int]) -> tuple[int, ...]:
        """Return a group without repetitions, in the order of acquisition: by (node, id)."""
        return tuple(sorted(set(group), key=lambda i: (self.nodes[i], i)))

    def append(self, entry: QueueEntry) -> None:
        """Queue an entry behind all others."""
        self._last += 1
        self._enter(entry, self._last)

    def push(self, entry: QueueEntry) -> None:
        """Queue an entry before all that wait: a resumed span, or a decode that overtakes one without room."""
        self._first -= 1
        self._enter(entry, self._first)

    def _enter(self, entry: QueueEntry, rank: int) -> None:
        entry.rank, entry.state = rank, "waiting"
        for i in entry.group:
            queue = self.waiting[i]
            # the usual case, an appended entry, needs no search
            if not queue or queue[-1].rank < rank:
                queue.append(entry)
            else:
                insort(queue, entry)

    def blocked(self, instance: int, owner: str) -> bool:
        """Return whether a request that comes now must queue for its scheduler: exclusive spans run or wait on the
        instance, a reservation waits, or another holder has it."""
        run = self.running[instance]
        if run is not None and not run.concurrent:
            return True
        if self.holder[instance] not in (None, owner):
            return True
        return any(not entry.concurrent and entry.kind != "scheduler" for entry in self.waiting[instance])

    def empty(self, instance: int) -> bool:
        """Return whether an instance has no reservation, no running span and no waiting entry."""
        return self.holder[instance] is None and self.running[instance] is None and not self.waiting[instance]

    def first(self, instance: int) -> QueueEntry | None:
        """Return the next entry of an instance; where it is reserved, the holder's first one. None: there is none."""
        holder = self.holder[instance]
        if holder is None:
            queue = self.waiting[instance]
            return queue[0] if queue else None
        return next((entry for entry in self.waiting[instance] if entry.owner == holder), None)

    def ready(self, entry: QueueEntry) -> bool:
        """Return whether it is an entry's turn on all of its instances at once. Spans need instances without a running
        span; requests on their way to a scheduler need instances without an exclusive one."""
        if entry.after is not None and entry.after.state != "done":
            return False
        for i in entry.group:
            if self.first(i) is not entry:
                return False
            run = self.running[i]
            # a concurrent span computes together with the scheduler's requests, so that more of these may enter
            if run is not None and not (entry.kind == "scheduler" and run.concurrent):
                return False
        return True

    def candidates(self, instances: Iterable[int]) -> list[QueueEntry]:
        """Return the first entries of these instances' queues, by rank, each once."""
        # by identity: an entry is first in several queues of its group
        found = {id(entry): entry for i in instances if (entry := self.first(i)) is not None}
        return sorted(found.values())

    def start(self, entry: QueueEntry) -> None:
        """Take an entry out of its queues: a span runs from now on, a reservation is granted, a request may enter its
        scheduler. Raises InvariantError if it is not ready."""
        if not self.ready(entry):
            raise InvariantError(f"it is not the turn of {entry.owner}")
        self._leave(entry)
        if entry.kind == "span":
            for i in entry.group:
                self.running[i] = entry
            entry.state = "running"
        elif entry.kind == "hold":
            for i in entry.group:
                self.holder[i] = entry.owner
            entry.state = "done"
        else:
            entry.state = "done"

    def finish(self, entry: QueueEntry) -> None:
        """Mark a running span as complete; its group is free."""
        self._stop(entry)
        entry.state = "done"

    def unqueue(self, entry: QueueEntry) -> None:
        """Take an entry, waiting or running, off its instances, to be queued again or dropped."""
        if entry.state == "running":
            self._stop(entry)
        elif entry.state == "waiting":
            self._leave(entry)
        entry.state = "unqueued"

    def release(self, holder: str, group: Iterable[int] = ()) -> tuple[int, ...]:
        """End a holder's reservation of these instances (none named: all), and return those that it had. Waiting
        reservations are untouched (`GroupReservations.withdraw`)."""
        named = set(group)
        freed = []
        for i, at in enumerate(self.holder):
            if at == holder and (not named or i in named):
                self.holder[i] = None
                freed.append(i)
        return tuple(freed)

    def _stop(self, entry: QueueEntry) -> None:
        for i in entry.group:
            if self.running[i] is not entry:
                raise InvariantError(f"{entry.owner} does not run on instance {i}")
            self.running[i] = None

    def _leave(self, entry: QueueEntry) -> None:
        for i in entry.group:
            self.waiting[i].remove(entry)

    def check(self) -> None:
        """Raise InvariantError unless queues are in order, each span runs on all of its group, and none runs on an
        instance that is reserved for another holder. For tests."""
        for i, queue in enumerate(self.waiting):
            if any(a.rank >= b.rank for a, b in pairwise(queue)):
                raise InvariantError(f"the queue of instance {i} is out of order")
            if any(entry.state != "waiting" or i not in entry.group for entry in queue):
                raise InvariantError(f"the queue of instance {i} has an entry that does not wait there")
            run = self.running[i]
            if run is not None:
                if any(self.running[j] is not run for j in run.group):
                    raise InvariantError(f"{run.owner} runs on part of its group")
                if self.holder[i] not in (None, run.owner):
                    raise InvariantError(f"{run.owner} runs on instance {i}, which {self.holder[i]} holds")


class SpanEntry(QueueEntry):
    """A committed span of a request, from its commit to its end, with the point from which it continues."""

    __slots__ = ("backend_state", "batch_leader", "batched_with", "began_s", "controlled", "extra_s", "index", "last",
                 "layer", "predicted_s", "resumed", "share", "span", "tokens")  # fmt: skip

    def __init__(
        self,
        controlled: ControlledRequest,
        span: Span,
        index: int,
        group: tuple[int, ...],
        predicted_s: float,
        after: SpanEntry | None = None,
        concurrent: bool = False,
    ) -> None:
        super().__init__("span", controlled.request.id, group, after, concurrent)
        # index: place among the request's committed spans
        self.controlled, self.span, self.index = controlled, span, index
        # the span ends the prompt: the first output token comes with it
        self.last = span.end == controlled.request.prompt_tokens
        # seconds of the whole span, uninterrupted
        self.predicted_s = predicted_s
        # where it continues: from `layer` on, for the tokens from `tokens` on
        self.layer, self.tokens = 0, span.start
        # elapsed share of its time at that point; None: the layers' share
        self.share: float | None = None
        # when it began or went on, seconds
        self.began_s = 0.0
        # seconds to restore its state when it resumes
        self.extra_s = 0.0
        # it has been paused: its group has its state
        self.resumed = False
        # of a batch, one entry is in the queues: it has the others here, and is their `batch_leader`
        self.batched_with: list[SpanEntry] = []
        self.batch_leader: SpanEntry | None = None
        # the backend's own state of it
        self.backend_state: Any = None

    def elapsed_share(self, layers: int) -> float:
        """Return the elapsed share of its predicted time at the point where it continues."""
        return self.layer / layers if self.share is None else self.share

    def remaining_s(self, layers: int) -> float:
        """Return the predicted seconds from the point where it continues."""
        return self.predicted_s * (1.0 - self.elapsed_share(layers)) + self.extra_s

    def progress(self) -> SpanProgress:
        """Return how much of it is computed; valid after a pause."""
        return SpanProgress(self.tokens, self.layer)


class SchedulerEntry(QueueEntry):
    """A request on its way to a scheduler."""

    __slots__ = ("controlled", "phase", "seconds", "tokens")

    def __init__(
        self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, tokens: int, seconds: float
    ) -> None:
        super().__init__("scheduler", controlled.request.id, group)
        # tokens: prompt tokens to compute there. seconds: predicted time of these alone.
        self.controlled, self.phase, self.tokens, self.seconds = controlled, phase, tokens, seconds

    def remaining_s(self, layers: int) -> float:
        return self.seconds


class ControlledRequest:
    """A request from arrival to end."""

    __slots__ = ("backend_state", "ended", "entries", "group", "kv_at", "output_tokens", "phase", "prefix", "rejected",
                 "request", "resident", "scheduler_entry", "transfer_targets")  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.entries: list[SpanEntry] = []  # committed spans, in order
        self.scheduler_entry: SchedulerEntry | None = None  # its queue entry for a scheduler, while it waits there
        self.resident = False  # it is resident in the scheduler of `group`, for `phase`
        self.group: tuple[int, ...] = ()  # after it has left the scheduler: where its KV is
        self.phase: Phase = "all"
        self.output_tokens = 0  # as of when it last left a scheduler
        self.transfer_targets: dict[int, int] = {}  # target instance of spans that have not begun, by index
        self.kv_at: set[int] = set()  # instances to which all announced KV has been sent
        self.prefix: CachedPrefix | None = None  # cached KV that its last action copies to its group
        self.ended = False
        self.rejected = False  # the policy, or a scheduler, refused it: set when it ends
        self.backend_state: Any = None  # the backend's own state of it

    def places(self) -> set[int]:
        """Return the instances that the request depends on: where its KV is or will be. Slices under way come on top
        (`TransferQueue.all_ends`)."""
        found = set(self.group) | self.kv_at | set(self.transfer_targets.values())
        if self.scheduler_entry is not None:
            found.update(self.scheduler_entry.group)
        for entry in self.entries:
            # a completed span matters only until the request has been resident: from then on `group` has its KV
            if entry.state != "done" or not self.group:
                found.update(entry.group)
        return found


# Predicted times at which instances will be free, from an absolute time line of all entries in their queues.
#
# Spans and requests on their way to a scheduler are laid out in order of rank, behind what schedulers have to prefill.
#
# Each commit extends the time line. It is laid out again when an entry took longer or shorter than predicted, or left
# its place, so that predictions never drift (with 30% noise, plans on a time line that is not anchored do worse than a
# fixed ring).

# seconds; differences below are rounding, not wrong predictions
CLOSE_S = 1e-9


class FreeTimes:
    """Predicted end of each entry (`QueueEntry.planned_s`) and of all entries of each instance (`free_s`)."""

    def __init__(self, queues: InstanceQueues, layers: int, busy_s: Callable[[QueueEntry], float]) -> None:
        """layers: of the model. busy_s: absolute time, in seconds, at which prefills in the schedulers of an entry's
        instances are expected to have ended; 0.0 for an entry that does not wait for them."""
        self._queues = queues
        self._layers = layers
        self._busy_s = busy_s
        # absolute seconds, by instance; in the past: free
        self.free_s = [0.0] * len(queues.nodes)

    def extend(self, entry: QueueEntry, now: float) -> None:
        """Lay out an entry that was appended behind all others: O(group), the usual case."""
        # a group computes in lockstep: it begins when the last of its instances is free
        start = max(self._busy_s(entry), *(self.free_s[i] for i in entry.group))
        start = max(start, now, entry.ready_s, entry.after.planned_s if entry.after is not None else now)
        entry.planned_s = start + entry.remaining_s(self._layers)
        for i in entry.group:
            self.free_s[i] = entry.planned_s

    def started(self, entry: QueueEntry, now: float) -> bool:
        """Set the predicted end of a span that begins now. Return whether it differs from the planned one, so that the
        entries behind it must be laid out again."""
        end_s = now + entry.remaining_s(self._layers)
        late = abs(end_s - entry.planned_s) > CLOSE_S
        entry.planned_s = end_s
        return late

    def finished(self, entry: QueueEntry, now: float) -> bool:
        """Set the end of a span that ends now. Return as `started` does."""
        late = abs(now - entry.planned_s) > CLOSE_S
        entry.planned_s = now
        return late

    def relayout(self, now: float) -> Iterable[int]:
        """Lay out all entries again, and return the instances whose free time has changed. O(entries log entries)."""
        queues = self._queues
        free = [now] * len(self.free_s)
        running = {id(run): run for run in queues.running if run is not None}
        for run in running.values():
            # an overdue span is expected to end at any moment
            run.planned_s = max(run.planned_s, now)
            for i in run.group:
                free[i] = run.planned_s
        # reservations have no predicted length
        waiting = {id(entry): entry for queue in queues.waiting for entry in queue if entry.kind != "hold"}
        # the backend's answer by (group, concurrent): the same for all entries of one layout
        busy: dict[tuple[tuple[int, ...], bool], float] = {}
        # by rank: all entries that an entry can wait for have been laid out before it
        for entry in sorted(waiting.values()):
            key = entry.group, entry.concurrent
            start = busy.get(key, -1.0)
            if start < 0.0:
                start = busy[key] = self._busy_s(entry)
            for i in entry.group:
                if free[i] > start:
                    start = free[i]
            if entry.ready_s > start:
                start = entry.ready_s
            if entry.after is not None and entry.after.state != "done":
                start = max(start, entry.after.planned_s)
            entry.planned_s = start + entry.remaining_s(self._layers)
            for i in entry.group:
                free[i] = entry.planned_s
        # a free time in the past means the same as now
        changed = [i for i, (old, new) in enumerate(zip(self.free_s, free, strict=True)) if max(old, now) != new]
        self.free_s = free
        return changed


# KV transfers between instances: senders and receive backends as limited resources, with Tetris's handshake.
#
# A slice is what one instance of a group sends. It needs its sender (one slice at a time) and a receive backend of the
# target (`receive_backends` at a time). Backends go to requests in order of their first handshake (Tetris §4.2, Fig.
# 7), until all chunks of a request have arrived: a request's later chunks do not starve behind others' first ones, also
# where a chunk is announced after all earlier ones have arrived. The paper "reserves" backends; here a request keeps
# its rank, and a backend that it leaves idle between two chunks serves others meanwhile.


class KvSlice:
    """The KV of a request's tokens [start, end) that lies on `source`, to be sent to `target`."""

    __slots__ = ("backend_state", "began_s", "end", "ended", "entry", "number", "overlapped", "request", "share",
                 "source", "start", "target")  # fmt: skip

    def __init__(
        self,
        request: str,
        source: int,
        target: int,
        start: int = 0,
        end: int = 0,
        share: int = 1,
        entry: SpanEntry | None = None,
        overlapped: bool = False,
    ) -> None:
        # request id; ids of the sending and the receiving instance
        self.request, self.source, self.target = request, source, target
        # share: number of instances that the tokens' KV is spread over; each sends one slice
        self.start, self.end, self.share = start, end, share
        # entry: the span that computes the KV, if it may still run. overlapped: all layers but the last one
        # have been sent while they were computed
        self.entry, self.overlapped = entry, overlapped
        # when it was granted its sender and a receive backend
        self.began_s = 0.0
        # it has arrived, or its transfer was cancelled
        self.ended = False
        # 1, 2, … in order of announcement; names the slice in logs
        self.number = 0
        # the backend's own state of it
        self.backend_state: Any = None


class TransferQueue:
    """All KV transfers of one cluster, announced and granted. It has no clock: times are the callers'."""

    def __init__(self, receive_backends: int, order: str = "handshake") -> None:
        """receive_backends: slices that an instance receives at a time. order: "handshake" ranks a slice by its
        request's first announcement to the target, any other value by its own (a baseline)."""
        self._receive_backends = receive_backends
        self._handshake = order == "handshake"
        # receive backends that are free, by target; missing: all
        self._free: dict[int, int] = {}
        # the slice that each sender sends, by source
        self._sending: dict[int, KvSlice] = {}
        # heap for each target of (time of the ranking announcement, number, slice)
        self._waiting: dict[int, list[tuple[float, int, KvSlice]]] = {}
        # slices that were set aside, by target and request: see `parks`
        self._parked: dict[int, dict[str, list[tuple[float, int, KvSlice]]]] = {}
        self.parks = False
        """Whether slices that are not ready are set aside until `unpark`. While some are, `start` asks about one of
        them per target, so that the backend grants blocks that were freed."""
        # time of the first announcement, by (request, target), until the request's last slice has arrived or it ends
        self._first: dict[tuple[str, int], float] = {}
        # slices announced and not arrived, by (request, target); never 0
        self._left: dict[tuple[str, int], int] = {}
        self._serial = 0

    def add(self, kv_slices: list[KvSlice], now: float) -> None:
        """Announce slices, all of one request and target, at time `now` in seconds."""
        for kv_slice in kv_slices:
            key = (kv_slice.request, kv_slice.target)
            first = self._first.setdefault(key, now)
            self._left[key] = self._left.get(key, 0) + 1
            self._serial += 1
            kv_slice.number = self._serial
            at = first if self._handshake else now
            heapq.heappush(self._waiting.setdefault(kv_slice.target, []), (at, self._serial, kv_slice))

    def left(self, request: str, target: int) -> int:
        """Return the number of a request's slices that are announced to a target and have not arrived."""
        return self._left.get((request, target), 0)

    def start(self, now: float, ready: Callable[[KvSlice], bool] = lambda kv_slice: True) -> list[KvSlice]:
        """Grant senders and receive backends to waiting slices, and return the slices to send now.

        ready: whether a slice has all else that it needs. A slice that waits for blocks holds neither sender nor
        backend: what it waits for may be freed by others' slices.
        """
        begun: list[KvSlice] = []
        for target, heap in self._waiting.items():
            skipped = []
            parked = self._parked.setdefault(target, {}) if self.parks else {}
            if parked and self._free.get(target, self._receive_backends) > 0:
                ready(next(iter(parked.values()))[0][2])
            while heap and self._free.get(target, self._receive_backends) > 0:
                item = heapq.heappop(heap)
                kv_slice = item[2]
                # a slice that cannot go yet must not block the target for slices of other senders
                if kv_slice.source in self._sending:
                    skipped.append(item)
                    continue
                if not ready(kv_slice):
                    (parked.setdefault(kv_slice.request, []) if self.parks else skipped).append(item)
                    continue
                self._free[target] = self._free.get(target, self._receive_backends) - 1
                self._sending[kv_slice.source] = kv_slice
                kv_slice.began_s = now
                begun.append(kv_slice)
            # put back with their old rank
            for item in skipped:
                heapq.heappush(heap, item)
        return begun

    def unpark(self, request: str, target: int) -> None:
        """Let a request's slices that were set aside wait again: the target has blocks for them (see `parks`)."""
        for item in self._parked.get(target, {}).pop(request, ()):
            heapq.heappush(self._waiting[target], item)

    def finish(self, kv_slice: KvSlice, more: bool = False) -> bool:
        """Free the sender and backend of a slice that has arrived. Return whether it was the last announced one of its
        request to that target. more: the request will announce further ones, so it keeps its rank. No effect, and
        False, if its transfer has ended already."""
        if kv_slice.ended:
            return False
        self._end(kv_slice)
        return self._count((kv_slice.request, kv_slice.target), 1, more)

    def drop(self, request: str) -> None:
        """Withdraw the slices of an ended request that have not been granted, and its ranks."""
        for target in self._parked:
            self.unpark(request, target)
        for target, heap in self._waiting.items():
            if (request, target) not in self._left:
                continue
            kept = [item for item in heap if item[2].request != request]
            if len(kept) != len(heap):
                heapq.heapify(kept)
                gone, self._waiting[target] = len(heap) - len(kept), kept
                self._count((request, target), gone)
        for key in [key for key in self._first if key[0] == request and key not in self._left]:
            del self._first[key]

    def cancel(self, request: str) -> None:
        """Withdraw all slices of a request; transfers under way end now, without `finish`."""
        self.drop(request)
        for kv_slice in [kv_slice for kv_slice in self._sending.values() if kv_slice.request == request]:
            self._end(kv_slice)
            self._count((request, kv_slice.target), 1)

    def lose(self, instance: int) -> None:
        """End the transfers under way from and to a lost instance. Waiting slices are dropped with their requests."""
        for kv_slice in [
            kv_slice for kv_slice in self._sending.values() if instance in (kv_slice.source, kv_slice.target)
        ]:
            self._end(kv_slice)
            self._count((kv_slice.request, kv_slice.target), 1)

    def all_ends(self) -> Iterator[tuple[str, int]]:
        """Yield (request, instance) for both ends of every slice, waiting or under way; pairs may repeat."""
        waiting = (item[2] for heap in self._waiting.values() for item in heap)
        parked = (item[2] for each in self._parked.values() for items in each.values() for item in items)
        for kv_slice in (*waiting, *parked, *self._sending.values()):
            yield kv_slice.request, kv_slice.source
            yield kv_slice.request, kv_slice.target

    def under_way(self) -> list[KvSlice]:
        """Return the slices that have been granted and have not ended."""
        return list(self._sending.values())

    def _end(self, kv_slice: KvSlice) -> None:
        kv_slice.ended = True
        self._free[kv_slice.target] += 1
        del self._sending[kv_slice.source]

    def _count(self, key: tuple[str, int], fewer: int, more: bool = False) -> bool:
        """Subtract slices that are no longer expected; return whether none is left. more: others will be announced."""
        self._left[key] -= fewer
        if self._left[key]:
            return False
        del self._left[key]
        if not more:
            # a later announcement of the request to this target ranks as a new first handshake
            del self._first[key]
        return True
