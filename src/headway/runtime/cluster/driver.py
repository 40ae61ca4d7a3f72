"""The live cluster's controller: what instances report goes in; deltas, policy events and what they are to do come out.

One per cluster, of native instances or of servers behind HTTP, made when the first instances are ready. Everything
happens on the asyncio event loop, in the order in which reports arrive; after each of them the `ClusterController` is
settled once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import cast

import msgspec

from headway.control.controller import ClusterController
from headway.control.entries import SpanEntry
from headway.control.log import RecordingController
from headway.core.errors import ConfigError, RequestError, UnavailableError
from headway.core.logs import EventSink
from headway.perf.hardware import ModelShape
from headway.perf.latency.groups import GroupLatency
from headway.policy.placement.contract import ClusterInstance, ClusterLinks, ClusterState, PlacementPolicy
from headway.runtime.cluster.http_backend import HttpAnswers, HttpBackend, HttpInstance
from headway.runtime.cluster.instances import LiveInstance
from headway.runtime.cluster.membership import ClusterMembership, PlacementChain
from headway.runtime.cluster.native_backend import LatencyOf, LiveBackend
from headway.runtime.cluster.requests import (
    BatchComplete,
    ClusterRequests,
    DecodeOver,
    InstanceRegistry,
    InstanceTable,
    RequestAttempt,
    RequestReleased,
    SliceSent,
)
from headway.runtime.engine.protocol import (
    ChunkSample,
    EngineSamples,
    FromInstance,
    IterationSample,
    KvArrived,
    OutputDelta,
    ReserveKv,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
    TransferSample,
)

log = logging.getLogger("headway.cluster")

TRY_AGAIN_S = 1.0
"""Seconds until another try after settling has failed."""
SILENT_S = 300.0
"""Seconds without a message after which an instance counts as stuck though its process sends heartbeats: no iteration
takes that long."""


class InstanceMessages:
    """Handles messages in the order in which they arrive; after each, the controller is settled if it may have to act.

    Errors of the settling that follows a message may concern other requests and are not attributed to its own.
    """

    def __init__(
        self,
        controller: ClusterController,
        backend: LiveBackend,
        requests: ClusterRequests,
        membership: ClusterMembership,
        settle: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._controller, self._backend, self._requests, self._membership = controller, backend, requests, membership
        self._settle, self._clock = settle, clock
        self._silent: asyncio.TimerHandle | None = None
        self.sampled: Callable[[int, EngineSamples], None] = lambda number, samples: None
        """Called with samples of what instances compute outside of their schedulers."""

    def heard(self, number: int, delta: OutputDelta) -> None:
        """See `InstanceRoster`."""
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
        """See `InstanceRoster`."""
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
                    entry = self._backend.runs.paused(number, attempt, message)
                    if entry is not None:
                        layer, tokens, share = self._backend.paused(entry)
                        self._controller.span_paused(entry, layer, self._clock(), tokens, share)
                # Late: the request has gone on without whatever was lost there.
                case SpanTaskLost() if not attempt.may_lose(number):
                    return
                # Later, not at once: a peer's loss is often noticed before the end of its process is.
                case SpanTaskLost(why=why, by=by):
                    self._requests.retry(attempt, f"instance {number}: {why}", later=True)
                    self._suspect(number, by, attempt.asked.submit.id, why)
                case ReserveKv(serial=serial):
                    self._backend.moves.reserved(attempt, number, serial)
                case KvArrived(source=source):
                    self._backend.peers.worked((number, source))
                    self._backend.moves.arrived(attempt, message)
        self._settle()

    def measured(self, number: int) -> None:
        """See `InstanceRoster`."""
        self._controller.changed((number,), self._clock())
        # Snapshots come ten times a second per instance; only a span that waits for free KV can profit from one.
        if self._backend.rooms.waiting:
            self._settle()

    def complete(self, entry: SpanEntry | None) -> None:
        """Report a complete span, or batch of spans, to the controller. None: nothing is complete yet."""
        if entry is None:
            return
        # Reservations shrink first: the controller chooses the next KV target inside `span_done`.
        self._backend.rooms.done(entry)
        # Taken before `span_done`, which may begin the requests' next spans.
        members = [member.controlled.backend_state for member in (entry, *entry.batched_with)]
        self._controller.span_done(entry, self._clock(), entry.backend_state.over)
        for attempt in members:
            self._backend.moves.computed(attempt)

    def decoded(self, attempt: RequestAttempt, ended: bool) -> None:
        """Report to the controller that a request has left its scheduler. ended: with its last token."""
        self._controller.left_scheduler(attempt.controlled, attempt.said, ended, self._clock())

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
            self._backend.load(number).first_token(attempt.request.id)
            self._controller.changed((number,), now)
        # A token in the middle of an answer changes no plan: settling for each would cost a policy call per token.
        if delta.finish is None and not first:
            return False
        if delta.finish in ("stop", "length"):
            attempt.finished = True
        elif delta.finish is not None:
            self._controller.drop(attempt.controlled, delta.error or delta.finish, now)
            self._requests.ended(attempt)
            return True
        # A whole prompt in one scheduler is a span too, and completes with its first token.
        if attempt.entry is not None:
            self.complete(self._backend.runs.first_token(attempt, delta))
        elif attempt.finished and attempt.controlled.resident:
            self.decoded(attempt, True)
        return True

    def _task_done(self, number: int, attempt: RequestAttempt, message: SpanTaskDone) -> None:
        # Before the message is handled, which takes the sender out of `running`: all links of the group have worked.
        self._backend.peers.worked({number, *attempt.running})
        # With a step number the group is decoding in place: the task was one token, not a span of the prompt.
        if attempt.step is None:
            self.complete(self._backend.runs.done(number, attempt, message))
        elif self._backend.stays.computed(number, attempt, message) and attempt.controlled.resident:
            self.decoded(attempt, True)

    def _staged(self, number: int, attempt: RequestAttempt) -> None:
        # Two causes: a decode that was told to halt, or a prefill-only request with its first token.
        if attempt.halts:
            self._backend.stays.staged(attempt, number)
        else:
            attempt.at, attempt.whole = None, {number}
            self._backend.load(number).left(attempt.request.id)
            if attempt.entry is None:
                self.decoded(attempt, False)

    def _suspect(self, number: int, by: int | None, request: str, why: str) -> None:
        """Count a loss at instance `number` against instance `by`, and restart the one that `PeerHealth` names."""
        other = None if by is None else self._backend.registry.get(by)
        if by is None or other is None or not other.serves:
            return
        verdict = self._backend.peers.lost(number, by, request, self._clock())
        if verdict is not None:
            membership = self._membership
            # Never give up an instance without which the policy could not place requests.
            for_good = verdict.for_good and membership.refuses(membership.others(verdict.number)) is None
            what = f"instances {number} and {by} do not work together: {why}" if number != by else why
            self._backend.registry[verdict.number].restart(f"instance {verdict.number} is ended: {what}", for_good)

    def restart_silent(self) -> None:
        """Restart instances that are silent for `SILENT_S`, now and every thirtieth of it from now on."""
        now = self._clock()
        for each in self._backend.registry:
            if each.serves and now - each.heard_s > SILENT_S:
                why = f"instance {each.number} is ended: it has said nothing for {SILENT_S:g} s, though it runs"
                each.restart(why, for_good=False)
        self._silent = asyncio.get_running_loop().call_later(SILENT_S / 30, self.restart_silent)

    def close(self) -> None:
        """Cancel the timer."""
        if self._silent is not None:
            self._silent.cancel()


def samples_of(number: int, message: FromInstance, attempt: RequestAttempt) -> EngineSamples | None:
    """Return the samples of a message of instance `number`; None for one that ends neither task nor slice."""
    name = attempt.asked.submit.id
    match message:
        case KvArrived():
            return EngineSamples(transfers=(TransferSample(name, message.source, message.began_s, message.ended_s),))
        case SpanTaskDone():
            return EngineSamples((_task(name, number, message, attempt),))
    return None


def _task(name: str, number: int, message: SpanTaskDone, attempt: RequestAttempt) -> IterationSample:
    begun_s = message.began_s
    # A group that decodes in place: the task is one token.
    if attempt.step is not None or message.index >= len(attempt.runs):
        return IterationSample(0, 0, begun_s, begun_s, message.ended_s, 0.0, 1)
    span = attempt.runs[message.index]
    prompt = max(span.end, attempt.request.prompt_tokens)
    limit = "rest of the prompt" if span.end >= prompt else "host or KV shard"
    # What the group computes together counts once: each instance shows its part.
    share = -(-(span.end - span.start) // len(span.group))
    start = min(span.end, span.start + share * span.group.index(number))
    chunk = ChunkSample(name, start, min(share, span.end - start), prompt - start, limit)
    return IterationSample(0, 0, begun_s, begun_s, message.ended_s, 0.0, 0, (chunk,))


class ClusterRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that depend on the instances' own reports, made once they are ready."""

    policy: Callable[[], PlacementPolicy]
    """Returns a new policy."""
    latency: GroupLatency
    """Predictor of spans and prompts."""
    shape: ModelShape
    latency_of: LatencyOf | None = None
    """Predictor of one instance; None: `latency` for all."""
    longest: Callable[[Sequence[ClusterInstance]], int] = lambda instances: 0
    """Tokens of the longest request that these instances hold (`contract.longest_request`); 0: not limited."""
    rows: int = 0
    """Most rows of a span that an instance computes at once (`SpanTask.rows`); 0: all."""
    log: EventSink | None = None
    """Receives the events of `control.log`."""
    about: object = None
    """What else a replay needs: written once, at the head of the log."""


class ClusterDriver:
    """Drives one `ClusterController` over live instances: puts the parts together, and settles them."""

    def __init__(
        self,
        registry: InstanceTable[LiveInstance] | InstanceTable[HttpInstance],
        links: ClusterLinks,
        rules: ClusterRules,
        backends: int = 16,
        in_place: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open all instances of `registry`; those that are not ready yet are closed again at once.

        backends: slices of KV that an instance receives at a time. in_place: groups decode where their KV lies
        (`LiveResidency`). clock: seconds, of the same clock as the event loop's.
        """
        self._clock = clock
        self.backend: LiveBackend | HttpBackend
        if isinstance(registry, InstanceRegistry):
            latency_of = rules.latency_of or (lambda info: rules.latency)
            self.backend = LiveBackend(registry, latency_of, rules.shape, in_place, rules.rows, clock)
        else:
            self.backend = HttpBackend(cast(InstanceTable[HttpInstance], registry), clock)
        cluster = ClusterState([each.initial_instance for each in registry if each.seen], links)
        self.policies, log = PlacementChain(rules.policy), rules.log
        kind = ClusterController if log is None else partial(RecordingController, sink=log, about=rules.about)
        self.controller: ClusterController = kind(
            cluster, self.backend, self.policies, layers=rules.shape.layers, receive_backends=backends
        )
        # The one timer of the policy's next wake-up.
        self._alarm: asyncio.TimerHandle | None = None
        self._settling = False
        settle = self.settle
        limits = max(each.limits for each in registry)
        self.requests = ClusterRequests(self.controller, self.backend, limits, settle, clock)
        self.membership = ClusterMembership(self.controller, self.backend, rules, self.requests, settle, clock)
        self.reports: InstanceMessages | HttpAnswers
        if isinstance(self.backend, LiveBackend):
            self.reports = InstanceMessages(
                self.controller, self.backend, self.requests, self.membership, settle, clock
            )
        else:
            self.reports = HttpAnswers(self.controller, self.backend, self.requests, settle, clock)
        # The controller opens every instance of its snapshot; those that are not ready join later through `joined`.
        for each in registry:
            if each.seen and each.state != "ready":
                self.controller.lost(each.number, clock())

    def begin(self) -> None:
        """Begin to watch the instances. Raises ConfigError where the policy cannot place requests on them."""
        self.membership.renew()
        if isinstance(self.reports, InstanceMessages):
            self.reports.restart_silent()
        if self.requests.not_placeable is not None:
            raise ConfigError(self.requests.not_placeable)

    def close(self) -> None:
        """Cancel all timers, and end all requests."""
        self._stop_alarm()
        self.reports.close()
        self.requests.retries.close()
        self.requests.fail_all(UnavailableError("the server is closing"))

    # -- settling -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let the controller act on all pending events. Called again from inside, it does nothing: the outer call goes
        round until nothing is pending.

        Raises nothing: an error is attributed to no request, and settling is tried again, at once and then after
        `TRY_AGAIN_S`.
        """
        if self._settling:
            return
        # The event that raised is usually consumed by then: a second try handles the rest.
        for _ in range(2):
            self._settling = True
            try:
                # To a fixed point: what `follow` reports back to the controller can make further actions possible.
                while True:
                    now = self._clock()
                    # Remaining prefill time shrinks with the clock, not with an event: before policies look.
                    self.controller.changed(self.backend.expecting(), now)
                    wake_s = self.controller.settle(now)
                    if not self._follow():
                        break
            except Exception:
                log.exception("the controller has failed at the consequences of an event")
                continue
            finally:
                self._settling = False
            # One timer at most: the newest wake-up time replaces the one before, also where it is later.
            self._stop_alarm()
            if wake_s is not None:
                self._set_alarm(wake_s - self._clock(), partial(self._wake, wake_s))
            return
        self._set_alarm(TRY_AGAIN_S, self.settle)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _set_alarm(self, delay_s: float, act: Callable[[], None]) -> None:
        self._stop_alarm()
        self._alarm = asyncio.get_running_loop().call_later(max(0.0, delay_s), act)

    def _wake(self, at_s: float) -> None:
        self._alarm = None
        try:
            # The timer may fire a clock tick early: a policy must not see a time before the one that it named.
            self.controller.woken(max(at_s, self._clock()))
        except Exception:
            log.exception("the controller has failed at waking its policies")
        self.settle()

    # -- what came up inside calls of the controller ------------------------------------------------------------------

    def _follow(self) -> bool:
        """Report back what came up inside calls of the controller, which is not re-entrant; True if there was any."""
        # Every part runs, whatever those before it return.
        some = [self._take_events(), self._follow_unplaced(), self._follow_kv_claims(), self._take_events()]
        # Last, so that new attempts see all that was freed above.
        some.append(self.requests.begin_due())
        self.membership.end_drained()
        return any(some)

    def _take_events(self) -> bool:
        """Give the controller what its backend has reported, in order; what these calls add is left for the next
        round."""
        events = self.backend.events
        some = False
        for event in [events.popleft() for _ in range(len(events))]:
            match event:
                case SliceSent(kv_slice):
                    some = True
                    with self._isolate(kv_slice.request):
                        self.controller.sent(kv_slice, self._clock())
                # It may have been dropped since.
                case BatchComplete(entry) if entry.state == "running":
                    some = True
                    with self._isolate(entry.owner):
                        cast(InstanceMessages, self.reports).complete(entry)
                # The decode ends as soon as it has begun.
                case DecodeOver(attempt) if attempt.controlled.resident:
                    some = True
                    with self._isolate(attempt.request.id):
                        self.controller.left_scheduler(attempt.controlled, attempt.said, True, self._clock())
                case RequestReleased(attempt, why):
                    if why is not None and attempt.controlled.rejected:
                        attempt.asked.fail(RequestError(why))
                    if why is None or attempt.controlled.rejected:
                        self.requests.ended(attempt)
        return some

    def _follow_unplaced(self) -> bool:
        """Let the requests that no policy will place arrive again."""
        some = False
        for name, failed in self.policies.unplaced.items():
            attempt = self.requests.attempts.named(name)
            # An end that failed half-way would be tried for ever.
            if attempt is not None and not attempt.controlled.ended:
                some = True
                # Counted as a loss, so that a policy that always fails does not retry for ever.
                attempt.asked.runs_lost += failed
                why = "its instances are gone, or its placement failed" if failed else "instances have come or gone"
                with self._isolate(name):
                    self.requests.retry(attempt, why)
        return some

    def _follow_kv_claims(self) -> bool:
        """A request that waits for KV which others, directly or not, would only free after it: it begins again."""
        found = self.backend.gives_way({name: number for number, name in enumerate(self.requests.asked)})
        if found is not None:
            attempt, helps = found
            why = "requests would wait for each other's room for KV"
            with self._isolate(attempt.request.id):
                self.requests.retry(attempt, why, later=not helps)
        return found is not None

    def _isolate(self, name: str) -> AbstractContextManager[None]:
        """Context in which an error fails one request only. Nothing is settled afterwards."""
        return self.requests.isolate(self.requests.attempts.named(name), name)
