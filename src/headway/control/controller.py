"""The cluster controller: a deterministic state machine between a placement policy and an `InstanceBackend`.

It carries out a policy's actions, whole or not at all, and passes what happens to the policy as events, in order. It
keeps the queue of each instance, reservations, each request's spans and scheduler, KV transfers, and the `ClusterState`
behind the policy's snapshots. It has no clock.

A driver (simulator, live cluster or replay) reports what has happened by callbacks in order of time, each with the
time; then it calls `settle`, which consults the policy, begins everything that can begin, and returns when the policy
wants to be woken (the driver calls `woken` then).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from headway.control.backend import ActionImpossible, InstanceBackend
from headway.control.dispatch import (
    ControllerState,
    EntryStarter,
    GroupReservations,
    KvMigrations,
    SchedulerResidency,
    SpanDispatcher,
    check_capable,
)
from headway.control.entries import ControlledRequest, KvSlice, SpanEntry
from headway.core.errors import InvariantError
from headway.core.request import Request
from headway.policy.placement.contract import (
    ALL_CAPABILITIES,
    Action,
    ActionRefused,
    ClusterInstance,
    ClusterSnapshot,
    ClusterState,
    CommitSpans,
    EnqueueRequest,
    Event,
    HoldGroup,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    PlacementPolicy,
    PreemptRequest,
    RejectRequest,
    ReleaseGroup,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RequestPrefilled,
    ResumeRequest,
    SpanDone,
    TransferKv,
    WakeupDue,
)


class ClusterController:
    """State machine between a placement policy and an `InstanceBackend`: callbacks of the driver in, calls of the
    backend out. Not thread-safe; no method blocks."""

    def __init__(
        self,
        cluster: ClusterState,
        backend: InstanceBackend,
        policy: PlacementPolicy,
        *,
        layers: int,
        receive_backends: int = 16,
        order: str = "handshake",
        stopwatch: Callable[[], float] | None = None,
    ) -> None:
        """layers: of the model: where spans can be paused. backends: KV slices that an instance receives at a time.
        order: of receiving (`transfer_queue.TransferQueue`). stopwatch: read around every call of the policy."""
        self.state = ControllerState(cluster, backend, layers, receive_backends, order)
        self.cluster, self.policy = cluster, policy
        self.queues, self.requests = self.state.queues, self.state.requests
        self.refused = 0  # actions that were refused
        self.decision_s: list[float] = []  # time of each call of the policy, if there is a stopwatch
        self._backend = backend
        self._limited = backend.capabilities != ALL_CAPABILITIES
        self._stopwatch = stopwatch
        self._pending_events = self.state.pending_events
        self._migrations = KvMigrations(self.state)
        self._reservations = GroupReservations(self.state)
        self._dispatcher = SpanDispatcher(self.state, self._migrations.begun, self.span_left)
        self._residency = SchedulerResidency(self.state, self._reject)
        self._starter = EntryStarter(self.state, self._dispatcher, self._residency, self._reservations)
        self._handlers: dict[type, Callable[[Any], None]] = {
            CommitSpans: self._dispatcher.commit,
            HoldGroup: self._reservations.hold,
            ReleaseGroup: self._reservations.release,
            EnqueueRequest: self._residency.enqueue,
            PreemptRequest: self._preempt,
            ResumeRequest: self._dispatcher.resume,
            TransferKv: self._migrations.transfer,
            RejectRequest: self._carry_out_rejection,
        }

    # -- callbacks of the driver --------------------------------------------------------------------------------------

    def arrive(
        self, request: Request, now: float, backend_state: Any = None, cached: tuple[int, ...] = ()
    ) -> ControlledRequest:
        """Add a request that has arrived; `backend_state`: the backend's own state of it; `cached`: see
        `RequestArrived`. An id may be used again after
        its request has ended; raises InvariantError before."""
        if request.id in self.requests:
            raise InvariantError(f"there is a request {request.id} already")
        self.state.now = now
        controlled = self.requests[request.id] = ControlledRequest(request)
        controlled.backend_state = backend_state
        self.cluster.arrived(now)
        self._pending_events.append(RequestArrived(request, cached))
        return controlled

    def span_done(self, entry: SpanEntry, now: float, finished: Collection[str] = ()) -> None:
        """Report that a running span is complete on its whole group. The prompt's last span yields the first token.
        `finished`: requests of the span, or batched with it, that have all of their output now."""
        self.state.now = now
        self._dispatcher.end(entry)
        for member in (entry, *entry.batched_with):
            controlled = member.controlled
            # of a batch, members may have been dropped while it ran
            if controlled.ended:
                continue
            if member.last:
                controlled.output_tokens += 1
            self._pending_events.append(SpanDone(member.owner, entry.index, member.last))
            if member.last and member.owner in finished:
                # after SpanDone: RequestFinished is a request's last event
                self._finish(controlled)

    def span_paused(
        self, entry: SpanEntry, layer: int, now: float, tokens: int | None = None, share: float | None = None
    ) -> None:
        """Report that a running span has stopped before `layer`; its group keeps its state. If it is computed in
        pieces, `tokens` of the prompt are complete in all layers, and `layer` is of the next piece. share: elapsed
        share of its time, if that is not the layer's share of all layers."""
        self.state.now = now
        self._dispatcher.paused(entry, layer, tokens, share)

    def left_scheduler(self, controlled: ControlledRequest, tokens: int, finished: bool, now: float) -> None:
        """Report that a request has left its scheduler by itself: with all of its output (`finished`), or with its
        first token after phase "prefill". tokens: output tokens so far."""
        self.state.now = now
        self._residency.left(controlled)
        controlled.output_tokens = tokens
        if finished:
            self._finish(controlled)
        else:
            self._pending_events.append(RequestPrefilled(controlled.request.id, controlled.group))

    def sent(self, kv_slice: KvSlice, now: float) -> None:
        """Report that a KV slice has arrived: its sender and receiver are free. No effect if its transfer has ended."""
        self.state.now = now
        self._migrations.sent(kv_slice, self.requests.get(kv_slice.request))

    def drop(self, controlled: ControlledRequest, why: str, now: float) -> None:
        """End a request without all of its output: its client left, or its KV was lost. No effect if it has ended."""
        self.state.now = now
        if not controlled.ended:
            self._drop(controlled, why)

    def changed(self, instances: Iterable[int], now: float) -> None:
        """Report that the load of these instances' schedulers has changed: `InstanceBackend.refresh` is called before
        the policy's next event."""
        self.state.now = now
        self.state.touch(instances)

    def woken(self, now: float, event: Event | None = None) -> None:
        """Report that the time returned by `settle` has come: the policy receives `WakeupDue`, or another event of the
        driver."""
        self.state.now = now
        self._pending_events.append(event or WakeupDue())

    def span_left(self, entry: SpanEntry) -> None:
        """A span, with those batched with it, ends, pauses or is stopped. For `RecordingController`."""

    # -- instances come and go ----------------------------------------------------------------------------------------

    def lost(self, instance: int, now: float) -> list[Request]:
        """Remove a lost instance with everything on it. Requests that used it are dropped, and returned in order of
        arrival for the driver to submit again; their spans end on all instances."""
        state = self.state
        state.now = now
        if instance in state.gone:
            return []
        # `close` has taken it out of the cluster state already
        if instance not in state.closed:
            self.cluster.remove(instance)
        state.closed.discard(instance)
        state.gone.add(instance)
        # before the RequestDropped of its requests: the policy must not place anything there in answer
        self._pending_events.append(InstanceLost(instance))
        hit = [self.requests[name] for name, places in state.everywhere().items() if instance in places]
        with state.single_relayout():
            for controlled in hit:
                self._drop(controlled, f"instance {instance} is gone")
            # after the drops, which release requests' reservations: left are those under other names
            self._reservations.lose(instance)
            state.transfers.lose(instance)
        return [controlled.request for controlled in hit]

    def close(self, instance: int, now: float) -> None:
        """Drain an instance: it has no role and no node in snapshots, and actions that give it a new request are
        refused. The policy receives `InstanceLeft`. Requests there go on; `quiet` is true when none is left."""
        self.state.now = now
        if instance not in self.state.gone and instance not in self.state.closed:
            self.state.closed.add(instance)
            self.cluster.remove(instance)
            self._pending_events.append(InstanceLeft(instance))

    def reserve(self, instance: ClusterInstance) -> None:
        """Take the next id for an instance that is not there yet; the policy hears of it when `open` adds it."""
        self._extend(instance)
        self.cluster.remove(instance.id)
        self.state.gone.add(instance.id)

    def _extend(self, instance: ClusterInstance) -> None:
        """Add an instance to the cluster state, new or again."""
        known = instance.id < len(self.cluster.instances)
        self.cluster.add(instance)
        if not known:
            self.state.join(instance.node)

    def open(self, instance: ClusterInstance, now: float) -> None:
        """Add an instance, new (with the next id), lost before (now empty) or closed. The policy receives
        `InstanceJoined`, then `WakeupDue`, so that it places requests that found no instance."""
        state = self.state
        state.now = now
        known = instance.id < len(self.cluster.instances)
        if known and instance.id not in state.gone and instance.id not in state.closed:
            raise InvariantError(f"instance {instance.id} is there already")
        self._extend(instance)
        # a lost instance may come back on another node
        state.queues.nodes[instance.id] = instance.node
        state.gone.discard(instance.id)
        state.closed.discard(instance.id)
        state.relayout()
        state.touch((instance.id,))
        self._pending_events += (InstanceJoined(instance.id), WakeupDue())

    def quiet(self, instance: int) -> bool:
        """Return whether no request uses an instance."""
        return self.queues.empty(instance) and not any(
            instance in places for places in self.state.everywhere().values()
        )

    # -- the policy ---------------------------------------------------------------------------------------------------

    def deliver_events(self) -> None:
        """Pass all pending events to the policy, and carry out its actions."""
        pending_events, state, policy = self._pending_events, self.state, self.policy
        while pending_events:
            event = pending_events.popleft()
            if isinstance(event, RequestFinished | RequestDropped):
                # from this event on, the policy must not name the request; the id may be used again
                state.ending.discard(event.request)
            # before each event, not once: the actions of the last one have changed instances
            state.flush()
            view = ClusterSnapshot(self.cluster, state.now)
            if self._stopwatch is None:
                wanted = policy.on_event(event, view)
            else:
                began = self._stopwatch()
                wanted = policy.on_event(event, view)
                self.decision_s.append(self._stopwatch() - began)
            for action in wanted:
                self.do(action)

    def settle(self, now: float) -> float | None:
        """Pass pending events to the policy and begin what can begin, until nothing changes. Return the time at which
        the policy wants to be woken, if no event comes first; None: never. Called by the driver after its callbacks of
        one point in time."""
        state = self.state
        state.now = now
        self.deliver_events()
        while self._starter.start_ready() or self._pending_events:
            self.deliver_events()
        # after all actions: slices announced at the same time compete by first handshake, not by call order
        for kv_slice in state.transfers.start(now, self._backend.ready):
            self._backend.send(kv_slice, now)
        # last: an iteration must not be formed before all requests of this moment are in the schedulers
        self._backend.pump(now)
        state.flush()
        return self.policy.next_wakeup(now)

    def do(self, action: Action) -> None:
        """Carry out one action, or add `ActionRefused` to the pending events."""
        try:
            if self._limited:
                check_capable(action, self._backend.capabilities)
            self._handlers[type(action)](action)
        except ActionImpossible as why:
            self.refused += 1
            name = action.holder if isinstance(action, HoldGroup | ReleaseGroup) else action.request
            self._pending_events.append(ActionRefused(name, action.name, str(why)))

    def _preempt(self, action: PreemptRequest) -> None:
        controlled = self.state.request(action.request)
        entry = next((e for e in controlled.entries if e.state == "running"), None)
        if entry is not None:
            if "pause" not in self._backend.capabilities:
                raise ActionImpossible("its instances do not pause a prefill")
            self._dispatcher.preempt(entry)
        elif controlled.resident and controlled.phase == "decode":
            if "decode_pause" not in self._backend.capabilities:
                raise ActionImpossible("its instances do not pause a decode")
            self._residency.preempt(controlled)
        else:
            raise ActionImpossible(f"{action.request} does not run")

    def _carry_out_rejection(self, action: RejectRequest) -> None:
        self._reject(self.state.request(action.request), action.why)

    # -- ends of requests ------------------------------------------------------------------------------------------

    def _finish(self, controlled: ControlledRequest) -> None:
        self._forget(controlled, None)
        self._pending_events.append(RequestFinished(controlled.request.id))

    def _reject(self, controlled: ControlledRequest, why: str) -> None:
        controlled.rejected = True
        self._drop(controlled, why)

    def _drop(self, controlled: ControlledRequest, why: str) -> None:
        self._forget(controlled, why)
        self._pending_events.append(RequestDropped(controlled.request.id, why, controlled.rejected))

    def _forget(self, controlled: ControlledRequest, why: str | None) -> None:
        """End a request: free its scheduler slot, queue entries, reservations and transfers. `why` None: it has all of
        its output."""
        state, name = self.state, controlled.request.id
        self._residency.leave(controlled, "ended")
        self._residency.withdraw(controlled)
        # before `leave`: a batch is stopped when the last of its members has ended
        controlled.ended = True
        state.ending.add(name)
        left = [entry for entry in controlled.entries if entry.state != "done"]
        for entry in left:
            self._dispatcher.leave(entry)
        # slices that have been granted go on until `sent`, or until the backend has stopped them: bytes are on the wire
        state.transfers.drop(name)
        self._reservations.withdraw(name)
        self._reservations.release_now(name)
        # after all entries have left: one new layout of the time line for all of them
        if left:
            state.relayout()
        del self.requests[name]
        if self._backend.forget(controlled, why, state.now):
            state.transfers.cancel(name)
