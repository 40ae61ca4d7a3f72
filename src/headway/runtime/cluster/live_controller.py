"""The live cluster's controller loop: messages of instances go in; deltas, policy events and messages to instances come
out.

One per cluster, made when the first instances are ready. Everything happens on the asyncio event loop, in the order in
which messages arrive; after each of them the `ClusterController` is settled once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from headway.control.controller import ClusterController
from headway.control.decision_log import RecordingController
from headway.control.queue_entries import SpanEntry
from headway.core.errors import ConfigError, InvariantError, RequestError
from headway.core.request import Request
from headway.perf.hardware.shapes import ModelShape
from headway.policy.placement import base
from headway.policy.placement.base import PlacementPolicy
from headway.policy.placement.view import ClusterLinks, ClusterSnapshot, ClusterState
from headway.runtime.cluster.attempt import AttemptTable, RequestAttempt
from headway.runtime.cluster.cluster_request import ClusterRequest
from headway.runtime.cluster.deadlock import EVERY_S, DeadlockDetector
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.live_backend import LatencyOf, LiveBackend
from headway.runtime.cluster.messages import (
    FromInstance,
    KvArrived,
    KvReserved,
    KvStaged,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
)
from headway.runtime.cluster.peer_health import PeerHealth
from headway.runtime.cluster.policies import PlacementChain, may_of
from headway.runtime.cluster.retries import RetryQueue
from headway.runtime.cluster.settling_loop import SettlingLoop
from headway.runtime.engine.protocol import OutputDelta

log = logging.getLogger("headway.cluster")

SILENT_S = 300.0
"""Seconds without a message after which an instance counts as stuck though its process sends heartbeats: no iteration
takes that long."""


class DecisionLog(NamedTuple):
    """Destination of the lines of `control.decision_log`."""

    sink: Callable[[bytes], object]
    """Called with each line."""
    about: object
    """What else a replay needs: written once, at the head of the log."""


class LiveController:
    """Drives one `ClusterController` over live instances."""

    def __init__(
        self,
        fleet: InstanceRegistry,
        links: ClusterLinks,
        make: Callable[[], PlacementPolicy],
        latency_of: LatencyOf,
        shape: ModelShape,
        backends: int = 16,
        most_losses: int = 3,
        in_place: bool = False,
        rows: int = 0,
        log: DecisionLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open all instances of `fleet`; those that are not ready yet are closed again at once.

        make: returns a new policy. shape: of the model. backends: slices of KV that an instance receives at a time.
        most_losses: instances that may be lost with a request on them; with one more the request counts as the cause.
        in_place: groups decode where their KV lies (`LiveResidency`). rows: see `SpanTask.rows`. log: of all decisions,
        for a replay. clock: seconds, of the same clock as the event loop's.
        """
        self.fleet, self._make, self._clock = fleet, make, clock
        self.attempts = AttemptTable()
        self.asked: dict[str, ClusterRequest] = {}
        self.retries = RetryQueue(self.settle, most_losses)
        self._sent: list[Any] = []
        self._watch: asyncio.TimerHandle | None = None
        self._lookout: asyncio.TimerHandle | None = None
        self.leaving: set[int] = set()
        """Instances that are drained, until no request has work or KV on them."""
        self.able: str | None = None
        """Why no request can be placed; None: requests can be placed."""
        instances = [each.initial_instance for each in fleet]
        self.book = ClusterState(instances, links)
        self.hands = LiveBackend(
            fleet,
            self.attempts,
            latency_of,
            shape,
            in_place,
            rows,
            self._sent.append,
            lambda name: self.machine.cancel(name),
            clock,
        )
        self.policies = PlacementChain(make, lambda name, number: self._may(name, number))
        kind = ClusterController if log is None else partial(RecordingController, sink=log.sink, about=log.about)
        self.machine: ClusterController = kind(
            self.book, self.hands, self.policies, layers=shape.layers, receive_backends=backends
        )
        self._may = may_of(self.machine)
        self._loop = SettlingLoop(self.machine, self.hands.expecting, self._follow, clock)
        self._suspects = PeerHealth()
        self._knots = DeadlockDetector(fleet, self.attempts, self.machine.state.transfers)
        # The controller opens every instance of its snapshot; those that are not ready join later through `joined`.
        for each in fleet:
            if each.state != "ready":
                self.machine.lost(each.number, self._clock())

    @property
    def waiting(self) -> int:
        """Requests that have not begun anywhere."""
        begun = sum(1 for each in self.attempts if each.at is not None or each.runs)
        return len(self.asked) - begun

    @property
    def unanswered(self) -> int:
        """Requests without a first token."""
        return sum(1 for asked in self.asked.values() if not asked.answered)

    @property
    def running(self) -> int:
        """Requests with a span under way."""
        return sum(1 for attempt in self.attempts if attempt.running)

    @property
    def patience_s(self) -> float:
        """Seconds for Retry-After: until the first instance is expected to be free, between 1 and 30."""
        now = self._clock()
        free = [self.book.instances[number].free_at_s - now for number in self._there()]
        return min(30.0, max(1.0, min(free, default=1.0)))

    def placed(self) -> Counter[int]:
        """Count, for each instance, the requests that have or will have work or KV there."""
        planned = self.machine.state.everywhere()
        return Counter(i for each in self.attempts for i in each.places() | planned.get(each.request.id, set()))

    def figures(self, number: int) -> tuple[int, float]:
        """Return an instance's uncomputed prompt tokens, and the predicted seconds until they are computed."""
        if number >= len(self.book.instances):
            return 0, 0.0
        seen = self.book.instances[number]
        return seen.queued, max(0.0, seen.free_at_s - self._clock())

    def give_up(self, error: Exception) -> None:
        """Fail all requests: no instance is left, and none will join."""
        for asked in list(self.asked.values()):
            self._fail(asked, error)

    # -- clients ------------------------------------------------------------------------------------------------------

    def ask(self, asked: ClusterRequest) -> None:
        """Accept a request, and place it if that is possible now."""
        self.asked[asked.submit.id] = asked
        self._begin(asked)
        self.settle()

    def leave(self, asked: ClusterRequest, why: str = "its client left") -> None:
        """Drop a request whose output is not awaited any more. Harmless when the request has ended."""
        if self.asked.pop(asked.submit.id, None) is None:
            return
        self.retries.forget(asked)
        attempt = self.attempts.named(asked.name)
        if attempt is None:
            return
        try:
            self.machine.drop(attempt.controlled, why, self._clock())
        except Exception:
            # The controller's own clean-up did not finish: free the instances directly, or their KV would leak.
            log.exception("the controller has failed at letting go of %s", attempt.wire)
            self.fleet.forget(attempt)
            self.attempts.remove(attempt)
        self.settle()

    def _begin(self, asked: ClusterRequest) -> None:
        """Begin the first or another attempt at a request; fail the request if the controller raises."""
        try:
            self._attempt(asked)
        except Exception:
            log.exception("the controller has failed at placing %s", asked.submit.id)
            self._fail(asked, _own_failure())

    def _attempt(self, asked: ClusterRequest) -> None:
        # Without a usable set of instances a policy would raise: the request waits for the next `renew`.
        if self.able is not None:
            self.retries.wait(asked)
            return
        if (error := self.retries.given_up(asked)) is not None:
            self._fail(asked, error)
            return
        attempt = RequestAttempt(asked, asked.try_again())
        self.attempts.add(attempt)
        attempt.controlled = self.machine.arrive(attempt.request, self._clock(), attempt)

    def _retry(self, attempt: RequestAttempt, why: str, later: bool = False) -> None:
        """Drop a failed attempt and queue the next one.

        later: begin it after a pause, or as soon as membership changes; otherwise in the same settling.
        """
        log.info("%s: %s; it begins again with %d tokens said", attempt.request.id, why, len(attempt.asked.told))
        self.machine.drop(attempt.controlled, why, self._clock())
        self.retries.count(attempt)
        if later:
            self.retries.later(attempt.asked)
        else:
            self.retries.soon(attempt.asked)

    def _fail(self, asked: ClusterRequest, error: Exception) -> None:
        asked.fail(error)
        self.leave(asked)

    # -- messages of instances ----------------------------------------------------------------------------------------

    def heard(self, number: int, delta: OutputDelta) -> None:
        """See `InstanceListener`."""
        self._blaming(self.attempts.get(delta.id), delta.id, lambda: self._hear(number, delta))

    def said(self, number: int, message: FromInstance) -> None:
        """See `InstanceListener`."""
        self._blaming(self.attempts.get(message.id), message.id, lambda: self._say(number, message))

    def _blaming(self, attempt: RequestAttempt | None, wire: str, act: Callable[[], bool]) -> None:
        """Call `act`; if it raises, fail the message's own request (HTTP 500) and nothing else.

        An error here is the controller's, not the sending instance's. Errors of the settling that follows may concern
        other requests and are not attributed to this one. act: returns whether the controller has to be settled.
        """
        try:
            follows = act()
        except Exception:
            log.exception("the controller has failed at a message about %s", wire)
            follows = True
            if attempt is not None:
                self._fail(attempt.asked, _own_failure())
        if follows:
            self.settle()

    def _hear(self, number: int, delta: OutputDelta) -> bool:
        attempt = self.attempts.get(delta.id)
        # Late deltas: of an attempt that was given up, or of a scheduler that the request has left since.
        if attempt is None or attempt.at != number or attempt.finished:
            return False
        drains = delta.rejected == "unavailable"
        # A migration that a newer one has overtaken can leave a decode without some of its KV.
        lacks_kv = delta.param == "id" and attempt.controlled.phase == "decode"
        # Neither is the request's fault: it is placed again instead of failing towards its client.
        if delta.finish == "error" and (drains or lacks_kv):
            self._retry(attempt, delta.error or "refused")
            return True
        first = not attempt.said and bool(delta.tokens or delta.finish)
        # The client gets the tokens before any decision that follows from them.
        attempt.asked.tell(delta)
        if first:
            self.hands.load(number).first_token(attempt.request.id)
            self._changed(number)
        # A token in the middle of an answer changes no plan: settling for each would cost a policy call per token.
        if delta.finish is None and not first:
            return False
        now = self._clock()
        if delta.finish in ("stop", "length"):
            attempt.finished = True
            # It ended with the token under way when it was told to stop: its pending slices count as arrived.
            if attempt.stopping:
                self.hands.moves.begun(attempt)
        elif delta.finish is not None:
            self.machine.drop(attempt.controlled, delta.error or delta.finish, now)
            self._over(attempt)
            return True
        # A whole prompt in one scheduler is a span too, and completes with its first token.
        if attempt.entry is not None:
            self._complete(self.hands.runs.first_token(attempt, delta))
        elif attempt.finished and attempt.controlled.resident:
            self.machine.left_scheduler(attempt.controlled, attempt.said, True, now)
        return True

    def _say(self, number: int, message: FromInstance) -> bool:
        attempt = self.attempts.get(message.id)
        if attempt is None:
            return False
        now = self._clock()
        # Before the message is handled, which takes the sender out of `running`: all links of the group have worked.
        if isinstance(message, SpanTaskDone):
            self._suspects.worked({number, *attempt.running})
        match message:
            # With a step number the group is decoding in place: the task was one token, not a span of the prompt.
            case SpanTaskDone() if attempt.step is not None:
                if self.hands.stays.computed(number, attempt, message) and attempt.controlled.resident:
                    self.machine.left_scheduler(attempt.controlled, attempt.said, True, now)
            case SpanTaskDone():
                self._complete(self.hands.runs.done(number, attempt, message))
            case SpanTaskPaused():
                entry = self.hands.runs.paused(number, attempt, message)
                if entry is not None:
                    layer, tokens, share = self.hands.paused(entry)
                    self.machine.span_paused(entry, layer, now, tokens, share)
            # Late: the request has gone on without whatever was lost there.
            case SpanTaskLost() if not attempt.may_lose(number):
                return False
            # Later, not at once: a peer's loss is often noticed before the end of its process is.
            case SpanTaskLost(why=why, by=by):
                self._retry(attempt, f"instance {number}: {why}", later=True)
                self._suspect(number, by, attempt.asked.submit.id, why)
            case KvReserved(serial=serial):
                self.hands.moves.reserved(attempt, number, serial)
                # Slices that waited have left with that call; the controller learns of them when they arrive.
                return False
            case KvArrived(source=source):
                self._suspects.worked((number, source))
                self.hands.moves.arrived(attempt, message)
            case KvStaged():
                # Two causes: a decode that was told to halt, or a prefill-only request with its first token.
                if attempt.at == number and attempt.halts:
                    self.hands.stays.staged(attempt, number)
                elif attempt.at == number:
                    attempt.at, attempt.whole = None, {number}
                    self.hands.load(number).left(attempt.request.id)
                    if attempt.entry is None:
                        self.machine.left_scheduler(attempt.controlled, attempt.said, False, now)
        return True

    def measured(self, number: int) -> None:
        """See `InstanceListener`."""
        self._knots.heard(number, self._clock())
        self._changed(number)
        # Snapshots come ten times a second per instance; only a span that waits for free KV can profit from one.
        if self.hands.rooms.waiting:
            self.settle()

    def _changed(self, number: int) -> None:
        self.machine.changed((number,), self._clock())

    def _complete(self, entry: SpanEntry | None) -> None:
        """Report a complete span, or batch of spans, to the controller. None: nothing is complete yet."""
        if entry is None:
            return
        # Reservations shrink first: the controller chooses the next KV target inside `span_done`.
        self.hands.rooms.done(entry)
        # Taken before `span_done`, which may begin the requests' next spans.
        members = [member.controlled.backend_state for member in (entry, *entry.batched_with)]
        self.machine.span_done(entry, self._clock(), entry.backend_state.over)
        for attempt in members:
            self.hands.moves.computed(attempt)

    # -- instances ----------------------------------------------------------------------------------------------------

    def joined(self, number: int) -> None:
        """See `InstanceListener`."""
        log.info("instance %d is ready", number)
        self.machine.open(self.fleet[number].initial_instance, self._clock())
        self.renew()

    def lost(self, number: int, why: str) -> None:
        """See `InstanceListener`."""
        # Taken before the controller forgets the instance, which also ends attempts.
        known = {attempt.request.id: attempt for attempt in self.attempts}
        on_it = [attempt for attempt in known.values() if number in attempt.places()]
        if on_it or self.fleet[number].state != "left":
            log.warning("instance %d is lost: %s", number, why)
        else:
            log.info("instance %d has left", number)
        # A restart that `PeerHealth` asked for says nothing about the requests that were there.
        innocent = self._suspects.gone(number)
        # The controller has dropped these itself; the others with anything there are dropped by `_retry` below.
        for request in self.machine.lost(number, self._clock()):
            self.retries.count(known[request.id])
            self.retries.soon(known[request.id].asked)
        for attempt in on_it:
            if not attempt.controlled.ended:
                self._retry(attempt, why)
            if not innocent and (error := self.retries.lost_with(attempt.asked)) is not None:
                self._fail(attempt.asked, error)
        self.leaving.discard(number)
        self.hands.loads.pop(number, None)
        self.renew()

    def _suspect(self, number: int, by: int | None, request: str, why: str) -> None:
        """Count a loss at instance `number` against instance `by`, and restart the one that `PeerHealth` names."""
        other = None if by is None else self.fleet.get(by)
        if by is None or other is None or not other.serves:
            return
        verdict = self._suspects.lost(number, by, request, self._clock())
        if verdict is not None:
            # Never give up an instance without which the policy could not place requests.
            for_good = verdict.for_good and self.refuses(self.others(verdict.number)) is None
            what = f"instances {number} and {by} do not work together: {why}" if number != by else why
            self.fleet[verdict.number].restart(f"instance {verdict.number} is ended: {what}", for_good)

    def close(self, number: int) -> None:
        """Place nothing new on an instance; `quiet` tells when nothing is left there."""
        self.machine.close(number, self._clock())
        self.leaving.add(number)
        self.renew()

    def quiet(self, number: int) -> bool:
        """Whether no request has or will have work or KV on an instance."""
        return self.machine.quiet(number) and not any(number in attempt.places() for attempt in self.attempts)

    def reserve(self, number: int) -> None:
        """Extend the cluster state by an instance that is starting under a new number."""
        if number == len(self.book.instances):
            now = self._clock()
            # Opened and closed at once: the number exists from now on, and `joined` opens it again.
            self.machine.open(self.fleet[number].initial_instance, now)
            self.machine.lost(number, now)
            self.settle()

    def renew(self) -> None:
        """Begin with a new policy after a change of membership; requests that the old one had not placed go to it."""
        # Peers meet before anything is placed: a span needs its group's connections.
        self.fleet.meet()
        self.able = self.refuses(self._there())
        self.machine.note("renew")
        for name in self.policies.renew():
            attempt = self.attempts.named(name)
            if attempt is not None:
                self._retry(attempt, "instances have come or gone")
        self.retries.release(self.able is None)
        self.settle()

    def refuses(self, there: Sequence[int]) -> str | None:
        """Return why the policy cannot place requests on these instances alone; None: it can."""
        if not there:
            return "no instance is there"
        # A copy of the state and a policy of its own: the probe request leaves no trace.
        book = ClusterState(self.book.instances, self.book.links)
        for i in set(range(len(book.instances))) - set(there):
            book.remove(i)
        probe = Request(id="", arrival_s=0.0, prompt_tokens=1, max_output_tokens=2)
        try:
            self._make().on_event(base.RequestArrived(probe), ClusterSnapshot(book, 0.0))
        except (ConfigError, ValueError, IndexError) as error:
            return str(error)
        return None

    def _there(self) -> list[int]:
        return [each.number for each in self.fleet if each.state == "ready" and each.number not in self.leaving]

    def others(self, number: int) -> list[int]:
        """Return the ready, not draining instances but for one."""
        return [one for one in self._there() if one != number]

    # -- the event loop -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let the controller act on all pending events. Raises nothing (`SettlingLoop.settle`)."""
        self._loop.settle()

    def look_out(self) -> None:
        """Restart instances that are silent for `SILENT_S`, now and every thirtieth of it from now on."""
        now = self._clock()
        for each in self.fleet:
            if each.serves and now - each.heard_s > SILENT_S:
                why = f"instance {each.number} is ended: it has said nothing for {SILENT_S:g} s, though it runs"
                each.restart(why, for_good=False)
        self._lookout = asyncio.get_running_loop().call_later(SILENT_S / 30, self.look_out)

    def _untie(self) -> None:
        """Restart the youngest of a set of deadlocked requests, which frees its KV blocks for the others."""
        self._watch = None
        try:
            found = self._knots.find(self._clock(), self.asked)
            if found is not None:
                attempt, helps = found
                self._retry(attempt, "requests wait for each other's room for KV", later=not helps)
        except Exception:
            log.exception("the controller has failed at untying requests")
        self.settle()

    def _apart(self, name: str, act: Callable[[], object]) -> None:
        """Call `act` for one request; an error fails that request only. Nothing is settled afterwards."""

        def done() -> bool:
            act()
            return False

        self._blaming(self.attempts.named(name), name, done)

    def _follow(self) -> bool:
        """Report back what came up inside calls of the controller, which is not re-entrant; True if there was any.

        Each list is swapped for an empty one before it is walked: what the calls add is left for the next round.
        """
        now, hands, some = self._clock(), self.hands, False
        # `_sent` and `policies.stranded` are emptied in place: others hold a reference to the list itself.
        sent, self._sent[:] = list(self._sent), []
        for piece in sent:
            some = True
            self._apart(piece.request, partial(self.machine.sent, piece, now))
        # Batches that are complete because their last member's request ended; one may have been dropped since.
        completed, hands.completed = hands.completed, []
        for entry in completed:
            if entry.state == "running":
                some = True
                self._apart(entry.owner, partial(self._complete, entry))
        # Requests whose last token came before their decode was placed: the decode ends as soon as it begins.
        over, hands.over[:] = list(hands.over), []
        for ended in over:
            if ended.controlled.resident:
                some = True
                self._apart(
                    ended.request.id, partial(self.machine.left_scheduler, ended.controlled, ended.said, True, now)
                )
        # Requests that no policy owns: their placement raised, or named instances that are gone.
        stranded, self.policies.stranded[:] = list(self.policies.stranded), []
        if stranded:
            self.machine.note("taken")
        for name in stranded:
            attempt = self.attempts.named(name)
            if attempt is not None:
                some = True
                # Counted as a loss, so that a policy that always fails does not retry for ever.
                attempt.asked.runs_lost += 1
                self._apart(name, partial(self._retry, attempt, "its instances are gone, or its placement failed"))
        while hands.ended:
            ended, why = hands.ended.popleft()
            if why is None:
                self._over(ended)
            elif ended.controlled.rejected:
                ended.asked.fail(RequestError(why))
                self._over(ended)
        # Last, so that new attempts see all that was freed above. The identity check: an id may be in use again.
        for asked in self.retries.take():
            if not asked.over and self.asked.get(asked.submit.id) is asked:
                some = True
                self._begin(asked)
        # The deadlock search runs only while a migration waits for KV blocks somewhere.
        if self._watch is None and hands.moves.waiting:
            self._watch = asyncio.get_running_loop().call_later(EVERY_S, self._untie)
        return some

    def _over(self, attempt: RequestAttempt) -> None:
        self.asked.pop(attempt.asked.submit.id, None)

    def close_all(self) -> None:
        """Cancel all timers."""
        self._loop.close()
        for timer in (self._watch, self._lookout):
            if timer is not None:
                timer.cancel()
        self.retries.close()


def _own_failure() -> InvariantError:
    return InvariantError("the controller has failed at this request; its log says at what. Others go on")
