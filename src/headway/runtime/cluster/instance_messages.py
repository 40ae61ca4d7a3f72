"""What instances report about requests (output, spans, KV, statistics), brought before the controller."""

from __future__ import annotations

from collections.abc import Callable

from headway.control.controller import ClusterController
from headway.control.queue_entries import SpanEntry
from headway.runtime.cluster.attempt import RequestAttempt
from headway.runtime.cluster.live_backend import LiveBackend
from headway.runtime.cluster.live_requests import LiveRequests
from headway.runtime.cluster.membership import LiveMembership
from headway.runtime.cluster.span_samples import samples_of
from headway.runtime.engine.instance_protocol import (
    FromInstance,
    KvArrived,
    ReserveKv,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
)
from headway.runtime.engine.protocol import EngineSamples, OutputDelta


class InstanceMessages:
    """Handles messages in the order in which they arrive; after each, the controller is settled if it may have to act.

    Errors of the settling that follows a message may concern other requests and are not attributed to its own.
    """

    def __init__(
        self,
        machine: ClusterController,
        hands: LiveBackend,
        requests: LiveRequests,
        membership: LiveMembership,
        settle: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._machine, self._hands, self._requests, self._membership = machine, hands, requests, membership
        self._settle, self._clock = settle, clock
        self.sampled: Callable[[int, EngineSamples], None] = lambda number, samples: None
        """Called with samples of what instances compute outside of their schedulers."""

    def heard(self, number: int, delta: OutputDelta) -> None:
        """See `InstanceListener`."""
        attempt = self._requests.attempts.get(delta.id)
        # Late deltas: of an attempt that was given up, or of a scheduler that the request has left since.
        if attempt is None or attempt.at != number or attempt.finished:
            return
        changed = True
        with self._requests.isolate(attempt, f"output of {delta.id}"):
            changed = self._output(number, attempt, delta)
        if changed:
            self._settle()

    def said(self, number: int, message: FromInstance) -> None:
        """See `InstanceListener`."""
        attempt = self._requests.attempts.get(message.id)
        # Late: of an attempt that was given up.
        if attempt is None:
            return
        # Before the controller, which may forget the attempt.
        if (samples := samples_of(number, message, attempt)) is not None:
            self.sampled(number, samples)
        with self._requests.isolate(attempt, f"a message about {message.id}"):
            match message:
                case SpanTaskDone():
                    self._task_done(number, attempt, message)
                case SpanTaskPaused():
                    entry = self._hands.runs.paused(number, attempt, message)
                    if entry is not None:
                        layer, tokens, share = self._hands.paused(entry)
                        self._machine.span_paused(entry, layer, self._clock(), tokens, share)
                # Late: the request has gone on without whatever was lost there.
                case SpanTaskLost() if not attempt.may_lose(number):
                    return
                # Later, not at once: a peer's loss is often noticed before the end of its process is.
                case SpanTaskLost(why=why, by=by):
                    self._requests.retry(attempt, f"instance {number}: {why}", later=True)
                    self._membership.suspect(number, by, attempt.asked.submit.id, why)
                case ReserveKv(serial=serial):
                    self._hands.moves.reserved(attempt, number, serial)
                case KvArrived(source=source):
                    self._membership.peers.worked((number, source))
                    self._hands.moves.arrived(attempt, message)
        self._settle()

    def measured(self, number: int) -> None:
        """See `InstanceListener`."""
        self._machine.changed((number,), self._clock())
        # Snapshots come ten times a second per instance; only a span that waits for free KV can profit from one.
        if self._hands.rooms.waiting:
            self._settle()

    def complete(self, entry: SpanEntry | None) -> None:
        """Report a complete span, or batch of spans, to the controller. None: nothing is complete yet."""
        if entry is None:
            return
        # Reservations shrink first: the controller chooses the next KV target inside `span_done`.
        self._hands.rooms.done(entry)
        # Taken before `span_done`, which may begin the requests' next spans.
        members = [member.controlled.backend_state for member in (entry, *entry.batched_with)]
        self._machine.span_done(entry, self._clock(), entry.backend_state.over)
        for attempt in members:
            self._hands.moves.computed(attempt)

    def decoded(self, attempt: RequestAttempt, ended: bool) -> None:
        """Report to the controller that a request has left its scheduler. ended: with its last token."""
        self._machine.left_scheduler(attempt.controlled, attempt.said, ended, self._clock())

    def _output(self, number: int, attempt: RequestAttempt, delta: OutputDelta) -> bool:
        drains = delta.rejected == "unavailable"
        # A migration that a newer one has overtaken can leave a decode without some of its KV.
        lacks_kv = delta.param == "id" and attempt.controlled.phase == "decode"
        # Neither is the request's fault: it is placed again instead of failing towards its client.
        if delta.finish == "error" and (drains or lacks_kv):
            self._requests.retry(attempt, delta.error or "refused")
            return True
        if delta.staged is not None:
            self._staged(number, attempt)
            return True
        first = not attempt.said and bool(delta.tokens or delta.finish)
        # The client gets the tokens before any decision that follows from them.
        attempt.asked.tell(delta)
        now = self._clock()
        if first:
            self._hands.load(number).first_token(attempt.request.id)
            self._machine.changed((number,), now)
        # A token in the middle of an answer changes no plan: settling for each would cost a policy call per token.
        if delta.finish is None and not first:
            return False
        if delta.finish in ("stop", "length"):
            attempt.finished = True
        elif delta.finish is not None:
            self._machine.drop(attempt.controlled, delta.error or delta.finish, now)
            self._requests.ended(attempt)
            return True
        # A whole prompt in one scheduler is a span too, and completes with its first token.
        if attempt.entry is not None:
            self.complete(self._hands.runs.first_token(attempt, delta))
        elif attempt.finished and attempt.controlled.resident:
            self.decoded(attempt, True)
        return True

    def _task_done(self, number: int, attempt: RequestAttempt, message: SpanTaskDone) -> None:
        # Before the message is handled, which takes the sender out of `running`: all links of the group have worked.
        self._membership.peers.worked({number, *attempt.running})
        # With a step number the group is decoding in place: the task was one token, not a span of the prompt.
        if attempt.step is None:
            self.complete(self._hands.runs.done(number, attempt, message))
        elif self._hands.stays.computed(number, attempt, message) and attempt.controlled.resident:
            self.decoded(attempt, True)

    def _staged(self, number: int, attempt: RequestAttempt) -> None:
        # Two causes: a decode that was told to halt, or a prefill-only request with its first token.
        if attempt.halts:
            self._hands.stays.staged(attempt, number)
        else:
            attempt.at, attempt.whole = None, {number}
            self._hands.load(number).left(attempt.request.id)
            if attempt.entry is None:
                self.decoded(attempt, False)
