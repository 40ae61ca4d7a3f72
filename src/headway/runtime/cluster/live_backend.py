"""The controller's backend over live instances: its decisions become messages, and its expectations are predicted
times.

Times are seconds of `time.monotonic()`, as the controller is called with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from headway.control.backend import ActionImpossible, SchedulerStats
from headway.control.controlled_request import ControlledRequest
from headway.control.kv_admission import KvAdmission
from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.core.request import Request
from headway.core.span import Span
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.groups import GroupLatency, GroupShape, batch_s
from headway.perf.latency.pause_points import pause_points_of
from headway.policy.placement.base import Phase
from headway.policy.placement.capabilities import NATIVE_CAPABILITIES
from headway.runtime.cluster.attempt import AttemptTable, RequestAttempt
from headway.runtime.cluster.group_steps import GroupDecodeSteps
from headway.runtime.cluster.instance_load import InstanceLoad
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.kv_migrations import LiveKvMigrations
from headway.runtime.cluster.residency import LiveResidency
from headway.runtime.cluster.span_runs import LiveSpanRuns
from headway.runtime.engine.protocol import EngineInfo

_ALONE = GroupShape(1)
LatencyOf = Callable[[EngineInfo | None], GroupLatency]
"""From an instance's report to the predictor of its times; None: the instance is not there now."""


class SliceSent(NamedTuple):
    """A KV slice has arrived."""

    kv_slice: KvSlice


class BatchComplete(NamedTuple):
    """A batch is complete without a message: its last member's request has ended."""

    entry: SpanEntry


class DecodeOver(NamedTuple):
    """A request had ended when its decode was enqueued."""

    attempt: RequestAttempt


class RequestReleased(NamedTuple):
    """The controller has released a request."""

    attempt: RequestAttempt
    why: str | None
    """None: all of its output was sent."""


BackendEvent = SliceSent | BatchComplete | DecodeOver | RequestReleased


class LiveBackend:
    """The `control.backend.InstanceBackend` of live instances."""

    capabilities = NATIVE_CAPABILITIES

    def __init__(
        self,
        fleet: InstanceRegistry,
        attempts: AttemptTable,
        latency_of: LatencyOf,
        shape: ModelShape,
        in_place: bool,
        rows: int,
        clock: Callable[[], float],
    ) -> None:
        """latency_of: predictor of an instance, and of a group that begins with it. in_place: groups decode where KV
        lies. rows: see `SpanTask.rows`.
        """
        self.fleet, self.attempts = fleet, attempts
        self._latency_of, self._clock = latency_of, clock
        self.events: deque[BackendEvent] = deque()
        """What has happened during calls, in order: `LiveController` takes it after each of them."""
        self._latencies: dict[int, tuple[EngineInfo | None, GroupLatency]] = {}
        self._layers = shape.layers
        self.loads: dict[int, InstanceLoad] = {}
        self.moves = LiveKvMigrations(fleet, attempts, self._sent)
        self.announced, self.ready, self.send = self.moves.announced, self.moves.ready, self.moves.send
        self.steps = GroupDecodeSteps(fleet)
        self.stays = LiveResidency(fleet, attempts, self.moves, self.steps, in_place, self._placed, self._over)
        self.rooms = KvAdmission(fleet.kv, clock)
        self.runs = LiveSpanRuns(fleet, self.rooms, shape, rows, self.stays.submit)
        self.fits, self.committed = self.runs.fits, self.runs.committed
        self.begin, self.pause = self.runs.begin, self.runs.pause

    # -- predictions --------------------------------------------------------------------------------------------------

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        for span in spans:
            if any(self.fleet.get(i) is None for i in span.group):
                raise ActionImpossible(f"{span.group} are not all there")
        shape = GroupShape(len(spans[0].group), nodes, spans[0].strategy)
        return batch_s(self._latency(spans[0].group[0]), ((span.start, span.end - span.start) for span in spans), shape)

    def prefill_estimate(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        tokens = request.prompt_tokens - request.cached_tokens
        return tokens, self._latency(group[0]).prefill_s(request.cached_tokens, tokens, _ALONE)

    def busy_s(self, group: tuple[int, ...]) -> float:
        # A group begins together: it is busy until its slowest member is free. 0: free now.
        left_s = max(self.load(i).left_s for i in group)
        return self._clock() + left_s if left_s else 0.0

    def refresh(self, instance: int) -> SchedulerStats:
        one, load = self.fleet.get(instance), self.load(instance)
        if one is None:
            return SchedulerStats()
        load.take(one.stats)
        left_s = load.left_s
        free_at_s = self._clock() + left_s if left_s else 0.0
        return SchedulerStats(free_at_s, load.queued, one.stats.kv_tokens_used, load.requests)

    # -- actions ------------------------------------------------------------------------------------------------------

    def stop(self, entry: SpanEntry, now: float) -> None:
        """Do nothing: the request is forgotten next, which stops the span."""

    def enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        attempt: RequestAttempt = controlled.backend_state
        self.stays.enter(attempt, group, phase)
        for i in group:
            self.load(i).entered(attempt.request.id)

    def leave(self, controlled: ControlledRequest, why: str, now: float) -> int:
        attempt: RequestAttempt = controlled.backend_state
        for i in controlled.group:
            self.load(i).left(attempt.request.id)
        if why == "moved":
            self.stays.leave(attempt)
        return attempt.said

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> bool:
        attempt: RequestAttempt = controlled.backend_state
        name = attempt.request.id
        # The estimate first, then reservations, then the message that frees the KV itself on each instance.
        for load in self.loads.values():
            load.remove(name)
        self.rooms.forget(name)
        self.fleet.forget(attempt)
        self.moves.forget(attempt)
        self.attempts.remove(attempt)
        # A batch continues with its next member; it may be complete because this one was the last.
        complete = self.runs.left(attempt)
        if complete is not None:
            self.events.append(BatchComplete(complete))
        self.events.append(RequestReleased(attempt, why))
        return True

    def pump(self, now: float) -> None:
        """Stop decodes that no group is to compute any more. Schedulers continue by themselves."""
        self.stays.pump()

    def held(self, holder: str, group: tuple[int, ...], now: float) -> None:
        """Do nothing: a span that has not begun does not run."""

    def released(self, holder: str, instances: Iterable[int], now: float) -> None:
        """As `held`."""

    # -- figures ------------------------------------------------------------------------------------------------------

    def load(self, instance: int) -> InstanceLoad:
        """Return the estimate of an instance's load, made at the first call."""
        return self.loads.setdefault(instance, InstanceLoad())

    def paused(self, entry: SpanEntry) -> tuple[int, int, float]:
        """Return where a span has paused: layer, tokens before its current piece, and the elapsed share of its time
        (see `ClusterController.span_paused`)."""
        said, attempt = entry.backend_state.paused, entry.controlled.backend_state
        run = attempt.runs[-1]
        shape = GroupShape(len(run.group), len({self.fleet[i].node for i in run.group}), run.strategy)
        points = pause_points_of(self._latency(run.group[0]), run.start, run.end, shape, run.rows, self._layers)
        return said.layer, said.tokens, points.elapsed_share(said.tokens, said.layer)

    def expecting(self) -> list[int]:
        """Return the instances whose schedulers have prompts to compute, whose remaining time has to be refreshed."""
        return [number for number, load in self.loads.items() if load.expects]

    def _latency(self, number: int) -> GroupLatency:
        """Return the predictor of an instance as it is now."""
        one = self.fleet.get(number)
        info = None if one is None else one.info
        # By identity: a restarted instance reports a new `EngineInfo`, maybe with another learned table.
        known = self._latencies.get(number)
        if known is None or known[0] is not info:
            known = self._latencies[number] = info, self._latency_of(info)
        return known[1]

    def _sent(self, kv_slice: KvSlice) -> None:
        self.events.append(SliceSent(kv_slice))

    def _over(self, attempt: RequestAttempt) -> None:
        self.events.append(DecodeOver(attempt))

    def _placed(self, attempt: RequestAttempt, number: int) -> None:
        past = attempt.cached[number] if number < len(attempt.cached) else 0
        tokens = attempt.request.prompt_tokens + attempt.said - past
        self.load(number).add(attempt.request.id, tokens, self._latency(number).prefill_s(past, tokens, _ALONE))
