"""The controller's state, and what it does with a policy's actions: it starts queue entries whose turn has come,
follows spans to their end, puts requests into schedulers, reserves groups, and migrates KV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

from headway.control.backend import ActionImpossible, InstanceBackend
from headway.control.entries import (
    ControlledRequest,
    FreeTimes,
    InstanceQueues,
    KvSlice,
    QueueEntry,
    SchedulerEntry,
    SpanEntry,
    TransferQueue,
)
from headway.core.errors import RequestError
from headway.core.request import Phase
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    Capability,
    ClusterState,
    CommitSpans,
    EnqueueRequest,
    Event,
    HoldGranted,
    HoldGroup,
    KvReady,
    ReleaseGroup,
    ResumeRequest,
    SpanPaused,
    SpanProgress,
    TransferKv,
)


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
            if i in self.closed and (controlled is None or i not in self.everywhere()[controlled.request.id]):
                raise ActionImpossible(f"instance {i} takes nothing new")

    def everywhere(self) -> dict[str, set[int]]:
        """Return the instances that each request depends on, by id, in order of arrival: its KV, queue entries, KV
        slices under way, reservations."""
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


class SpanDispatcher:
    """Queue entries of committed spans. Raises ActionImpossible for actions that cannot be carried out."""

    def __init__(
        self, state: ControllerState, begun: Callable[[SpanEntry], None], left: Callable[[SpanEntry], None]
    ) -> None:
        """`begun` is called with each span that begins, batched ones included, unless its request has ended; `left`
        with a span, or the first of a batch, that ends, pauses or is stopped."""
        self._state = state
        self._on_begin, self._on_left = begun, left

    # -- actions ------------------------------------------------------------------------------------------------------

    def commit(self, action: CommitSpans) -> None:
        """Append a request's spans to the queues of their groups, after any that it has committed before."""
        if action.batched_with:
            self._commit_batch(action)
            return
        state = self._state
        controlled = state.request(action.request)
        groups = [state.group(span.group, controlled) for span in action.spans]
        self._check_fresh((i for group in groups for i in group), action.version)
        # all spans are checked before the first is queued: an action is refused whole
        self._check_spans(controlled, action, groups)
        before = controlled.entries[-1] if controlled.entries else None
        controlled.prefix = action.prefix
        for span, group in zip(action.spans, groups, strict=True):
            seconds = state.backend.span_s((span,), self._nodes(group), before.group if before is not None else ())
            entry = SpanEntry(controlled, span, len(controlled.entries), group, seconds, before, action.concurrent)
            if action.prefix is not None and entry.index == 0:
                entry.ready_s = state.now + action.prefix.copy_s
            controlled.entries.append(entry)
            state.queues.append(entry)
            state.backend.committed(entry, state.now)
            # in this order: the next span's predicted start needs this one's predicted end
            state.timeline.extend(entry, state.now)
            state.add_tokens(group, span.end - span.start)
            state.touch(group)
            before = entry

    def _check_spans(self, controlled: ControlledRequest, action: CommitSpans, groups: list[tuple[int, ...]]) -> None:
        # the first span may start anywhere (after cached tokens); each next one where the last one ends
        at = controlled.entries[-1].span.end if controlled.entries else action.spans[0].start
        held = {i for i, holder in enumerate(self._state.queues.holder) if holder == action.request}
        for span, group in zip(action.spans, groups, strict=True):
            if span.start != at or span.end <= span.start:
                raise ActionImpossible(f"a span of tokens {span.start} to {span.end} does not go on from {at}")
            if held and not held.issuperset(group):
                raise ActionImpossible("a holder's spans must lie on what it holds")
            at = span.end
        if at > controlled.request.prompt_tokens:
            raise ActionImpossible(f"the prompt has {controlled.request.prompt_tokens} tokens, not {at}")

    def _check_fresh(self, instances: Iterable[int], version: int) -> None:
        changed_at = self._state.cluster.changed_at
        for i in instances:
            if changed_at[i] > version:
                raise ActionImpossible(f"instance {i} has changed since version {version}")

    def _nodes(self, group: tuple[int, ...]) -> int:
        nodes = self._state.queues.nodes
        return len({nodes[i] for i in group})

    def _commit_batch(self, action: CommitSpans) -> None:
        """Queue a batch: its first entry alone is in the queues; the others refer to it by `batch_leader`."""
        state = self._state
        spans = (*action.spans, *action.batched_with)
        requests = [state.request(span.request.id) for span in spans]
        group = state.group(spans[0].group, requests[0])
        self._check_fresh(group, action.version)
        names = {controlled.request.id for controlled in requests}
        if len(action.spans) != 1 or len(names) != len(spans) or spans[0].request.id != action.request:
            raise ActionImpossible("a batch has one span of each of its requests, the first one's first")
        # a reservation is of one request; the batch's other members would compute on instances that are not theirs
        if any(state.queues.holder[i] is not None for i in group):
            raise ActionImpossible("a batch cannot run on instances that are held")
        for span, controlled in zip(spans, requests, strict=True):
            if state.group(span.group, controlled) != group or controlled.entries:
                raise ActionImpossible("a batch runs on one group, and its requests have no other spans")
            if not 0 <= span.start < span.end <= controlled.request.prompt_tokens:
                raise ActionImpossible(f"tokens {span.start} to {span.end} are not in {span.request.id}'s prompt")
        # one prediction for the batch: its spans begin and end together
        seconds = state.backend.span_s(spans, self._nodes(group), ())
        entries = [
            SpanEntry(controlled, span, 0, group, seconds, None, action.concurrent)
            for span, controlled in zip(spans, requests, strict=True)
        ]
        for entry in entries:
            entry.controlled.entries.append(entry)
            state.add_tokens(group, entry.span.end - entry.span.start)
        leader, *others = entries
        for entry in others:
            # `InstanceQueues.append` sets the state of the leader only
            entry.state, entry.batch_leader = "waiting", leader
        leader.batched_with = others
        state.queues.append(leader)
        state.backend.committed(leader, state.now)
        state.timeline.extend(leader, state.now)
        state.touch(group)

    def preempt(self, entry: SpanEntry) -> None:
        """Request a pause of a running span; `paused` follows, or `end` where it completes first."""
        if entry.batched_with or entry.batch_leader is not None:
            raise ActionImpossible(f"{entry.owner} is computed in a batch")
        self._state.backend.pause(entry, self._state.now)

    def resume(self, action: ResumeRequest) -> None:
        """Put a request's paused spans before everything that waits on their instances."""
        state = self._state
        paused = [entry for entry in state.request(action.request).entries if entry.state == "unqueued"]
        if not paused:
            raise ActionImpossible(f"{action.request} is not paused")
        # only the span that was interrupted has state to restore
        paused[0].extra_s = action.lost_s
        # `push` gives ever lower ranks: the last span first, so that the first span ends up in front
        for entry in reversed(paused):
            state.queues.push(entry)
            state.touch(entry.group)
        state.relayout()

    # -- what becomes of them -----------------------------------------------------------------------------------------

    def begin(self, entry: SpanEntry) -> None:
        """Begin a span whose turn has come, and those batched with it."""
        state = self._state
        entry.began_s = state.now
        # The group is held, and waits for cached KV that is still on its way
        entry.extra_s = max(entry.extra_s, entry.ready_s - state.now)
        state.backend.begin(entry, state.now)
        for other in entry.batched_with:
            other.state = "running"
        for member in (entry, *entry.batched_with):
            # KV slices are announced as the span begins: the handshake of Tetris §4.2
            if not member.controlled.ended:  # a batch goes on without its first
                self._on_begin(member)
        # a start off its predicted time shifts everything behind it
        if state.timeline.started(entry, state.now):
            state.relayout()

    def end(self, entry: SpanEntry) -> None:
        """Take a completed span off its group."""
        state = self._state
        self._on_left(entry)
        state.queues.finish(entry)
        for member in (entry, *entry.batched_with):
            member.state = "done"
            state.subtract_tokens(member)
        state.touch(entry.group)
        entries = entry.controlled.entries
        # the request's next span waited for this one, maybe on other instances: scan their queues too
        if len(entries) > entry.index + 1:
            state.touch(entries[entry.index + 1].group)
        if state.timeline.finished(entry, state.now):
            state.relayout()

    def paused(self, entry: SpanEntry, layer: int, tokens: int | None, share: float | None) -> None:
        """Take a paused span and the request's later ones out of the queues; see `ClusterController.span_paused`."""
        state = self._state
        entry.layer, entry.extra_s, entry.resumed = layer, 0.0, True
        entry.tokens, entry.share = entry.span.start if tokens is None else tokens, share
        self._on_left(entry)
        for other in entry.controlled.entries[entry.index :]:
            state.queues.unqueue(other)
            state.touch(other.group)
        state.relayout()
        state.pending_events.append(SpanPaused(entry.owner, entry.index, entry.progress()))

    def leave(self, entry: SpanEntry) -> None:
        """Take a request that has ended out of a span. A batch goes on until all of its members have ended."""
        state, leader = self._state, entry.batch_leader
        # three cases: a member of a batch, the leader of a batch with members left, a span of its own
        if leader is not None:
            leader.batched_with.remove(entry)
            state.subtract_tokens(entry)
            entry.state = "unqueued"
            # the last member of a batch whose leader's request has ended before: nothing is left to compute
            if leader.batched_with or not leader.controlled.ended:
                return
            entry = leader
        # the leader is in the queues for the batch: it stays until the members have ended
        elif entry.batched_with:
            return
        if entry.state == "running":
            self._on_left(entry)
            state.backend.stop(entry, state.now)
        state.subtract_tokens(entry)
        state.queues.unqueue(entry)
        state.touch(entry.group)


class SchedulerResidency:
    """Requests in schedulers or queued for one. A request is in one scheduler, or in one queue for entry, at most."""

    def __init__(self, state: ControllerState, reject: Callable[[ControlledRequest, str], None]) -> None:
        """`reject` ends a request that a scheduler has refused, with the reason."""
        self._state = state
        self._reject = reject

    def enqueue(self, action: EnqueueRequest) -> None:
        """Give a request to the scheduler of a group, now or when its turn comes behind spans."""
        state = self._state
        controlled = state.request(action.request)
        group = state.group(action.group, controlled)
        if controlled.scheduler_entry is not None:
            raise ActionImpossible(f"{action.request} waits for its turn already")
        # from another scheduler it takes its KV along
        self.leave(controlled, "moved")
        controlled.prefix, request = action.prefix, controlled.request
        if action.prefix is not None:
            request = msgspec.structs.replace(request, cached_tokens=action.prefix.tokens)
        if not action.concurrent and any(state.queues.blocked(i, action.request) for i in group):
            # a decode has no prompt tokens left to compute: it counts as one, and delays no span
            tokens, seconds = (1, 0.0) if action.phase == "decode" else state.backend.prefill_estimate(request, group)
            entry = controlled.scheduler_entry = SchedulerEntry(controlled, group, action.phase, tokens, seconds)
            state.queues.append(entry)
            state.timeline.extend(entry, state.now)
            state.add_tokens(group, tokens)
            state.touch(group)
            return
        self._enter(controlled, group, action.phase)

    def admit(self, entry: SchedulerEntry) -> None:
        """Let a request whose turn has come enter its scheduler."""
        controlled = entry.controlled
        controlled.scheduler_entry = None
        self._subtract_tokens(entry)
        self._enter(controlled, entry.group, entry.phase)

    def overtake(self, span: QueueEntry) -> None:
        """Move decodes that wait behind a span without enough free KV before it, on all instances: they have their KV
        already, and free it when they end."""
        queues = self._state.queues
        # on all instances, not only the span's: a decode's KV may lie where the span needs blocks
        waiting = (other for queue in queues.waiting for other in queue if isinstance(other, SchedulerEntry))
        decodes = sorted({other for other in waiting if other.phase == "decode" and span.rank < other.rank})
        # `push` goes to the very front: in reverse, so that the decodes keep their order
        for entry in reversed(decodes):
            queues.unqueue(entry)
            queues.push(entry)
            self._state.touch(entry.group)
        if decodes:
            self._state.relayout()

    def _subtract_tokens(self, entry: SchedulerEntry) -> None:
        self._state.add_tokens(entry.group, -entry.tokens)
        self._state.touch(entry.group)

    def _enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase) -> None:
        state = self._state
        try:
            state.backend.enter(controlled, group, phase, state.now)
        except RequestError as error:
            self._reject(controlled, str(error))
            return
        # only after the scheduler has accepted it
        controlled.resident, controlled.group, controlled.phase = True, group, phase
        # from now on its KV is where it is resident; earlier copies no longer count as its places
        controlled.kv_at.clear()
        for i in group:
            state.residents[i] += 1
        state.touch(group)

    def preempt(self, controlled: ControlledRequest) -> None:
        """Pause a decode: `SpanPaused` follows, and its KV is kept."""
        self.leave(controlled, "moved")
        # a decode stops between iterations: all of its tokens are complete in all layers
        at = SpanProgress(controlled.request.prompt_tokens + controlled.output_tokens, 0)
        self._state.pending_events.append(SpanPaused(controlled.request.id, len(controlled.entries) - 1, at))

    def leave(self, controlled: ControlledRequest, why: str) -> None:
        """Take a request out of its scheduler, if it is in one, and keep the number of its output tokens. `why`: see
        `InstanceBackend.leave`."""
        if controlled.resident:
            controlled.output_tokens = self._state.backend.leave(controlled, why, self._state.now)
            self.left(controlled)

    def left(self, controlled: ControlledRequest) -> None:
        """Record that a request is no longer in its scheduler. Its `group` remains: its KV may still be there."""
        controlled.resident = False
        for i in controlled.group:
            self._state.residents[i] -= 1
        self._state.touch(controlled.group)

    def withdraw(self, controlled: ControlledRequest) -> None:
        """Take a request out of the queue for its scheduler, if it is in one."""
        entry = controlled.scheduler_entry
        if entry is not None:
            self._state.queues.unqueue(entry)
            self._subtract_tokens(entry)
            controlled.scheduler_entry = None
            self._state.relayout()


class GroupReservations:
    """Reservations, waiting and granted. `InstanceQueues.holder` has the granted ones, by instance."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        # queue entries of each holder that are not granted
        self._waiting: dict[str, list[QueueEntry]] = {}

    def hold(self, action: HoldGroup) -> None:
        """Queue a reservation. Raises ActionImpossible."""
        state = self._state
        # its request has ended, before the policy could know: no event would ever release the reservation
        if action.holder in state.ending:
            raise ActionImpossible(f"there is no request {action.holder}")
        group = state.group(action.group)
        if any(holder == action.holder for holder in state.queues.holder):
            # hold and wait could deadlock with another holder: a holder extends only by instances that are free now
            taken = [i for i in group if not state.queues.empty(i)]
            if taken:
                raise ActionImpossible(f"{action.holder} holds a group already, and instance {taken[0]} is not free")
        entry = QueueEntry("hold", action.holder, group)
        self._waiting.setdefault(action.holder, []).append(entry)
        state.queues.append(entry)
        state.touch(group)

    def release(self, action: ReleaseGroup) -> None:
        """Release the named instances; none named: all, and withdraw what the holder waits for."""
        if not action.group:
            self.withdraw(action.holder)
        self.release_now(action.holder, action.group)

    def withdraw(self, holder: str) -> None:
        """Withdraw a holder's waiting reservations."""
        for entry in self._waiting.pop(holder, ()):
            self._state.queues.unqueue(entry)
            self._state.touch(entry.group)

    def release_now(self, holder: str, group: Iterable[int] = ()) -> None:
        """Release these instances of a holder; none named: all."""
        freed = self._state.queues.release(holder, group)
        if freed:
            self._state.backend.released(holder, freed, self._state.now)
            self._state.touch(freed)

    def granted(self, entry: QueueEntry) -> None:
        """Report a reservation whose turn has come; `InstanceQueues.start` has set the holder."""
        self._remove_waiting(entry)
        self._state.backend.held(entry.owner, entry.group, self._state.now)
        self._state.pending_events.append(HoldGranted(entry.owner, entry.group))

    def lose(self, instance: int) -> None:
        """End reservations that involve a lost instance: it is released, waiting groups with it are refused. Requests
        with reservations there have been dropped before: left are reservations under other names."""
        state = self._state
        for entry in [e for e in state.queues.waiting[instance] if e.kind == "hold"]:
            state.queues.unqueue(entry)
            self._remove_waiting(entry)
            state.touch(entry.group)
            state.pending_events.append(ActionRefused(entry.owner, "hold", f"instance {instance} is gone"))
        holder = state.queues.holder[instance]
        if holder is not None:
            self.release_now(holder, (instance,))

    def _remove_waiting(self, entry: QueueEntry) -> None:
        others = [other for other in self._waiting.pop(entry.owner) if other is not entry]
        if others:
            self._waiting[entry.owner] = others


class EntryStarter:
    """Scan of the queues that have changed."""

    def __init__(
        self,
        state: ControllerState,
        dispatcher: SpanDispatcher,
        residency: SchedulerResidency,
        reservations: GroupReservations,
    ) -> None:
        self._state, self._dispatcher = state, dispatcher
        self._residency, self._reservations = residency, reservations

    def start_ready(self) -> bool:
        """Start the entries whose turn it is, in order of rank; return whether any was started."""
        state, queues, started = self._state, self._state.queues, False
        while state.touched:
            # only queues with a change can have a new ready entry; each start touches its group again
            touched, state.touched = state.touched, set()
            for entry in self._candidates(touched):
                if entry.state == "waiting" and queues.ready(entry) and self._schedulers_allow(entry):
                    # KV is short: decodes behind the span go first, because only their end frees blocks. The span
                    # is tried again when something changes on its group.
                    if isinstance(entry, SpanEntry) and not entry.concurrent and not state.backend.fits(entry):
                        self._residency.overtake(entry)
                        continue
                    queues.start(entry)
                    state.touch(entry.group)
                    if isinstance(entry, SpanEntry):
                        self._dispatcher.begin(entry)
                    elif isinstance(entry, SchedulerEntry):
                        self._residency.admit(entry)
                    else:
                        self._reservations.granted(entry)
                    started = True
        return started

    def _candidates(self, touched: set[int]) -> list[QueueEntry]:
        """Return what may begin now that these instances have changed, by rank."""
        found = self._state.queues.candidates(sorted(touched))
        # A prompt's first span waits for KV room on the instances of its later ones too.
        for entry in list(found):
            if isinstance(entry, SpanEntry) and entry.index:
                found.append(entry.controlled.entries[0])
        return sorted({id(entry): entry for entry in found}.values())

    def _schedulers_allow(self, entry: QueueEntry) -> bool:
        """Return whether schedulers let an entry begin: spans and reservations wait until the schedulers of their
        instances are empty, unless they are concurrent."""
        return entry.kind == "scheduler" or entry.concurrent or not any(self._state.residents[i] for i in entry.group)


class KvMigrations:
    """Transfers of requests' KV to one instance each, cut into slices for `TransferQueue`."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state

    def transfer(self, action: TransferKv) -> None:
        """Announce the KV of one span (if it has not begun: when it begins), or all of a request's KV now."""
        state = self._state
        controlled = state.request(action.request)
        state.group((action.to,), controlled)
        if action.index is not None:
            if not 0 <= action.index < len(controlled.entries):
                raise ActionImpossible(f"{action.request} has no span {action.index}")
            entry = controlled.entries[action.index]
            begun = entry.state in ("running", "done")
            if begun:
                self._check_there(action.request, entry.group)
            # the handshake's time ranks the transfer: not before there is something to send
            controlled.transfer_targets[action.index] = action.to
            if begun:
                self.begun(entry)
            return
        # KV lies where the request was last resident, else where its last span was committed
        group = controlled.group or (controlled.entries[-1].group if controlled.entries else ())
        if not group:
            raise ActionImpossible(f"{action.request} has no KV anywhere")
        self._check_there(action.request, group)
        # KV of prompt and output tokens, one slice from each instance of the group
        known, share = controlled.request.prompt_tokens + controlled.output_tokens, len(group)
        state.transfers.add(
            [KvSlice(action.request, i, action.to, 0, known, share, None, action.overlapped) for i in group], state.now
        )
        state.backend.announced(controlled, action.to, state.now)

    def _check_there(self, request: str, holders: tuple[int, ...]) -> None:
        gone = self._state.gone.intersection(holders)
        if gone:
            raise ActionImpossible(f"KV of {request} was on instance {min(gone)}, which is gone")

    def begun(self, entry: SpanEntry) -> None:
        """Announce the KV of a span that begins, if a transfer of it was asked for."""
        to = entry.controlled.transfer_targets.pop(entry.index, None)
        if to is None:
            return
        span, share, prefix = entry.span, len(entry.group), entry.controlled.prefix
        # the group sends its copy of a cached prefix along, unless the target is where that came from
        start = 0 if prefix is not None and entry.index == 0 and to != prefix.instance else span.start
        kv_slices = [KvSlice(entry.owner, i, to, start, span.end, share, entry) for i in entry.group]
        self._state.transfers.add(kv_slices, self._state.now)
        self._state.backend.announced(entry.controlled, to, self._state.now)

    def sent(self, kv_slice: KvSlice, controlled: ControlledRequest | None) -> None:
        """Record that a slice has arrived; `controlled`: its request, None if that has ended."""
        state = self._state
        # spans that have not begun are still to be sent: the request keeps its place, and KvReady, which comes
        # once, waits
        more = controlled is not None and bool(controlled.transfer_targets)
        if state.transfers.finish(kv_slice, more) and controlled is not None and not more:
            controlled.kv_at.add(kv_slice.target)
            state.pending_events.append(KvReady(kv_slice.request, kv_slice.target))


def check_capable(action: Action, has: frozenset[Capability]) -> None:
    """Raise ActionImpossible for an action that needs more than instances with these capabilities can do."""
    if isinstance(action, CommitSpans | EnqueueRequest | HoldGroup) and "groups" not in has:
        groups = [span.group for span in action.spans] if isinstance(action, CommitSpans) else [action.group]
        if any(len(group) > 1 for group in groups):
            raise ActionImpossible("its instances do not compute together")
    parts = isinstance(action, CommitSpans) or (isinstance(action, EnqueueRequest) and action.phase != "all")
    if parts and "spans" not in has:
        raise ActionImpossible("its instances serve whole requests")
    prefix = action.prefix if isinstance(action, CommitSpans | EnqueueRequest) else None
    if prefix is not None and prefix.copy_s > 0 and "prefix_copy" not in has:
        raise ActionImpossible("its instances copy no cached prefixes")
    if isinstance(action, TransferKv) and "kv_transfer" not in has:
        raise ActionImpossible("its instances move no KV")
