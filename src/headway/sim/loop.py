"""The event loop of all simulations, and `simulate`: equal instances, of which an arrival joins the least loaded.

Events are taken in order of (time, kind, order of scheduling). At one instant scheduled events come first, by kind,
then arrivals; only then are batches, spans and transfers started. This order is part of the result: it makes a run
reproducible bit by bit.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import IntEnum
from typing import Any

from headway.core.errors import ConfigError, PredictedLateError, RequestError
from headway.core.logs import EventSink
from headway.core.request import Request, Slo
from headway.sim.engine import DecodeTrack, SimulatedEngine
from headway.sim.metrics import NO_TARGETS, RequestRecord
from headway.sim.result import IterationRecord, SimResult, later, record_of
from headway.sim.spec import InstanceSpec, NoiseSource, RunSpec
from headway.sim.vllm.engine import SimulatedVllm
from headway.sim.workload import TraceRequest

NEVER = float("inf")

Look = Callable[[float], None]
"""Called every 1,024 instants with the virtual seconds."""


class EventKind(IntEnum):
    """Kind of an event; of events at one instant the lower kind is taken first."""

    SPAN_END = 0
    """A span of a cluster ends or pauses."""
    BATCH_END = 1
    """A batch leaves the last stage, or stage 0 becomes free."""
    KV_SENT = 2
    """A slice of KV has reached its target."""
    PREFIX_COPIED = 3
    """A cached prefix has reached the instance that asked for it."""
    TIMER = 4
    """A placement policy asked to be called."""
    CLIENT_LEAVES = 5
    """A client times out or loses patience."""
    PROMPT_READ = 6
    """An API server has read a prompt: its engine gets the request."""
    NEXT_TURN = 7
    """A session's next request arrives."""


class EventLoop(ABC):
    """One run of a workload in virtual time. This class orders the events; subclasses carry them out."""

    def __init__(self, workload: Iterable[TraceRequest], run: RunSpec) -> None:
        self.run_spec = run
        self.now = 0.0
        """Virtual clock, seconds."""
        self.end_s = run.window_s if run.window_s is not None else NEVER
        """Virtual seconds after which no event is taken; `NEVER` without a window."""
        ordered = sorted(workload, key=lambda request: request.arrival_s)
        self.arrivals = [request for request in ordered if request.arrival_s < self.end_s and not request.waits]
        # requests that follow an answer, by session and thread
        self._turns: dict[tuple[str | None, str], deque[TraceRequest]] = {}
        for request in ordered:
            if request.waits:
                self._turns.setdefault((request.session, request.thread), deque()).append(request)
        self.closed_loop = bool(self._turns)
        """Whether some requests arrive only after the answer to an earlier one of their session."""
        self._due: list[float] = []  # times of the events in the heap that bring a request, as a heap of its own
        # index into `arrivals` of the next one
        self._arrived = 0
        self._heap: list[tuple[float, EventKind, int, Any]] = []
        self._scheduled = 0
        self._departures: list[float] = []  # times of the CLIENT_LEAVES events in the heap, as a heap of its own
        self._patience = random.Random(f"patience {run.seed}")

    def schedule(self, at_s: float, kind: EventKind, what: Any) -> None:
        """Schedule a call of `on_event(kind, what)` at `at_s`, in virtual seconds."""
        self._scheduled += 1
        # the running number breaks ties, so that payloads are never compared
        heapq.heappush(self._heap, (at_s, kind, self._scheduled, what))

    @property
    def quiet_until_s(self) -> float:
        """Virtual time of the next arrival, departure or end of the window.

        Engines repeat decode steps without consulting the scheduler until then.
        """
        arrival_s = self.arrivals[self._arrived].arrival_s if self._arrived < len(self.arrivals) else NEVER
        if self._due:
            arrival_s = min(arrival_s, self._due[0])
        return min(arrival_s, self._departures[0] if self._departures else NEVER, self.end_s)

    @property
    def idle(self) -> bool:
        """Whether no event is to come."""
        return not self._heap and self._arrived == len(self.arrivals)

    def run_events(self, look: Look | None = None) -> None:
        """Process all events, up to the last one or the end of the window."""
        heap, arrivals, count, instants = self._heap, self.arrivals, len(self.arrivals), 0
        pop, leaves, turn = heapq.heappop, EventKind.CLIENT_LEAVES, EventKind.NEXT_TURN
        arrival_s = arrivals[0].arrival_s if count else NEVER
        while True:
            now = min(heap[0][0], arrival_s) if heap else arrival_s
            if now == NEVER or now > self.end_s:
                break
            self.now = now
            # an event may schedule another at this instant: the heap is read again each time
            while heap and heap[0][0] == now:
                _, kind, _, what = pop(heap)
                if kind < leaves:
                    self.on_event(kind, what)
                elif kind == leaves:
                    # departures leave both heaps in the same order of time, so this is the entry of this event
                    pop(self._departures)
                    self.on_event(kind, what)
                else:
                    pop(self._due)
                    if kind == turn:
                        self.on_arrival(what)
                    else:
                        self.on_event(kind, what)
            while arrival_s == now:
                source = arrivals[self._arrived]
                self._arrived += 1
                # `_arrived` is advanced first: `quiet_until_s` must be the arrival after this one
                self.on_arrival(source)
                arrival_s = arrivals[self._arrived].arrival_s if self._arrived < count else NEVER
            self.on_instant_end()
            instants += 1
            # every 1,024 instants
            if look is not None and not instants & 0x3FF:
                look(now)

    @abstractmethod
    def on_event(self, kind: EventKind, what: Any) -> None:
        """Carry out a scheduled event; `what` is the payload given to `schedule`."""

    @abstractmethod
    def on_arrival(self, source: TraceRequest) -> None:
        """Admit or reject an arriving request."""

    @abstractmethod
    def on_instant_end(self) -> None:
        """Start batches, spans and transfers, after all events of an instant."""

    # -- shared by subclasses -------------------------------------------------------------------------------------

    def request_of(self, source: TraceRequest, number: int) -> Request:
        """Return the scheduler's request `r{number}` for an arrival. At least its last prompt token is not cached."""
        run = self.run_spec
        targets = run.targets.get(source.klass, NO_TARGETS)
        return Request(
            id=f"r{number}",
            arrival_s=source.arrival_s,
            prompt_tokens=max(1, source.prompt_tokens),
            max_output_tokens=max(1, source.output_tokens, run.max_output or 0),
            # the last prompt token is always computed: it yields the first output token
            cached_tokens=max(0, min(source.cached_tokens, source.prompt_tokens - 1)),
            slo=Slo(targets.ttft_s, targets.tbt_s, run.refuse_late) if run.send_slo else Slo(),
            priority=source.priority,
        )

    def schedule_departure(self, departing: Any) -> None:
        """Schedule a CLIENT_LEAVES event for a request that has just arrived, if its client ever leaves.

        Its payload is (`departing`, reason); the reason is "timeout" or "aborted".
        """
        run = self.run_spec
        waits = [] if run.timeout_s is None else [(run.timeout_s, "timeout")]
        if run.patience_s is not None:
            waits.append((self._patience.expovariate(1.0 / run.patience_s), "aborted"))
        if waits:
            # whichever comes first: a client leaves once
            wait_s, why = min(waits)
            heapq.heappush(self._departures, self.now + wait_s)
            self.schedule(self.now + wait_s, EventKind.CLIENT_LEAVES, (departing, why))

    def schedule_next_turn(self, ended: TraceRequest) -> None:
        """Schedule the next request of a session whose last one has ended now, with success or not.

        Does nothing if there is none, or if it would arrive after the window."""
        waiting = self._turns.get((ended.session, ended.thread))
        if not waiting:
            return
        turn = waiting.popleft()
        at_s = self.now + (turn.think_s or 0.0)
        if at_s < self.end_s:
            self.schedule_request(at_s, EventKind.NEXT_TURN, replace(turn, arrival_s=at_s))

    def schedule_request(self, at_s: float, kind: EventKind, what: Any) -> None:
        """Schedule an event that brings a request: a NEXT_TURN or a PROMPT_READ."""
        heapq.heappush(self._due, at_s)
        self.schedule(at_s, kind, what)

    def observed_s(self, last_s: float) -> tuple[float, float]:
        """Return (end, duration) of the observed time: the window, or from the first arrival to `last_s`."""
        if self.run_spec.window_s is not None:
            return self.run_spec.window_s, self.run_spec.window_s
        return last_s, last_s - (self.arrivals[0].arrival_s if self.arrivals else 0.0)


def simulate(
    instance: InstanceSpec,
    workload: Iterable[TraceRequest],
    run: RunSpec = RunSpec(),  # noqa: B008 - frozen
    *,
    stopwatch: Callable[[], float] | None = None,
    log: EventSink | None = None,
) -> SimResult:
    """Run a workload to its end, or to the end of the window. Deterministic.

    `stopwatch` (such as time.perf_counter) is read around every decision, for `ReplicaUse.scheduling_s`; it changes
    nothing else. `log`: receives the event log; raises ConfigError for several replicas or a simulated vLLM.
    """
    simulation = InstanceSimulation(instance, workload, run, stopwatch, log)
    simulation.run_events()
    return simulation.result()


class InstanceSimulation(EventLoop):
    """One run of `run.replicas` equal instances; an arrival joins the one with the fewest unfinished requests."""

    def __init__(
        self,
        instance: InstanceSpec,
        workload: Iterable[TraceRequest],
        run: RunSpec,
        stopwatch: Callable[[], float] | None,
        log: EventSink | None = None,
    ) -> None:
        if log is not None and run.replicas > 1:
            raise ConfigError("an event log has one engine: set cluster.replicas to 1")
        super().__init__(workload, run)
        self.instance = instance
        self.iterations: list[IterationRecord] | None = [] if run.keep_iterations else None
        self.replicas = [self._engine(index, stopwatch, log) for index in range(run.replicas)]
        self.tracks: list[DecodeTrack] = []
        # replicas with an event at this instant: only those may start batches
        self._changed: set[int] = set()
        # of each replica's API server: when it has read the prompts that came, and how many its engine has not got yet
        self._read_s = [0.0] * run.replicas
        self._unread = [0] * run.replicas

    def _engine(
        self, index: int, stopwatch: Callable[[], float] | None, log: EventSink | None
    ) -> SimulatedEngine | SimulatedVllm:
        """Return the engine of one replica."""
        spec, run = self.instance, self.run_spec
        noise = NoiseSource(run.noise, f"noise {run.seed} {index}", spec.serving.spread)
        if spec.vllm is not None:
            if log is not None:
                raise ConfigError("an event log is written of Headway's own engine: leave out `engine: vllm`")
            return SimulatedVllm(index, spec, spec.vllm, noise, self.iterations, stopwatch)
        # every iteration has its line in a log
        fast_forward = run.fast_forward and log is None
        # an answer of one replica, stage or group brings the next turn, in the midst of decodes repeated by another
        if self.closed_loop and (run.replicas > 1 or spec.config.stages > 1 or spec.config.kv_parallel > 1):
            fast_forward = False
        return SimulatedEngine(index, spec, noise, fast_forward, self.iterations, stopwatch, log)

    def on_event(self, kind: EventKind, what: Any) -> None:
        if kind == EventKind.BATCH_END:
            index, batch = what
            # -1: stage 0 has become free, and no batch has ended
            if batch >= 0:
                ended = self.replicas[index].complete(batch, self.now)
                if self.closed_loop:
                    for track in ended:
                        self.schedule_next_turn(track.source)
            self._changed.add(index)
            return
        if kind == EventKind.PROMPT_READ:
            track, replica = what
            self._unread[replica.index] -= 1
            if track.ended_s is None:
                self._admit(track, replica)
            return
        track, why = what
        if track.ended_s is None:
            if track.request.id not in self.replicas[track.replica].tracks:
                # its prompt is still being read
                track.ended_s, track.error = self.now, why
                self.schedule_next_turn(track.source)
                return
            self.replicas[track.replica].abort(track, self.now, why)
            self._changed.add(track.replica)
            self.schedule_next_turn(track.source)

    def on_arrival(self, source: TraceRequest) -> None:
        track = DecodeTrack(self.request_of(source, len(self.tracks)), source)
        self.tracks.append(track)
        replica = self.replicas[0]
        if len(self.replicas) > 1:
            # join the shortest queue; ties go to the lowest index
            replica = min(self.replicas, key=lambda r: (len(r.tracks) + self._unread[r.index], r.index))
        token_s, index = self.instance.serving.token_s, replica.index
        if not token_s:
            if self._admit(track, replica):
                self.schedule_departure(track)
            return
        # one prompt is read after another
        self._read_s[index] = max(self.now, self._read_s[index]) + token_s * source.prompt_tokens
        self._unread[index] += 1
        track.replica = index
        self.schedule_request(self._read_s[index], EventKind.PROMPT_READ, (track, replica))
        self.schedule_departure(track)

    def _admit(self, track: DecodeTrack, replica: SimulatedEngine | SimulatedVllm) -> bool:
        """Give a request to its engine; return whether it took it."""
        try:
            replica.add(track, self.now)
        except (RequestError, PredictedLateError) as error:
            track.ended_s, track.error, track.rejected = self.now, str(error), True
            self.schedule_next_turn(track.source)
            return False
        self._changed.add(replica.index)
        return True

    def on_instant_end(self) -> None:
        changed = self._changed
        quiet_s = self.quiet_until_s
        # sorted: the order of a set must not reach the results
        for index in sorted(changed) if len(changed) > 1 else changed:
            for at_s, batch in self.replicas[index].start_batches(self.now, quiet_s):
                self.schedule(at_s, EventKind.BATCH_END, (index, batch))
        changed.clear()

    def result(self) -> SimResult:
        """Return the result of the run; requests still in a scheduler get unfinished records."""
        end_s, duration_s = self.observed_s(self.now)
        return SimResult(
            records=tuple(self._record(track) for track in self.tracks),
            replicas=tuple(replica.use(end_s) for replica in self.replicas),
            duration_s=duration_s,
            iterations=tuple(self.iterations or ()),
            utilisation_base=self.instance.utilisation_base,
            stages=self.instance.config.stages,
            groups=self.instance.config.kv_parallel,
        )

    def _record(self, track: DecodeTrack) -> RequestRecord:
        if track.ended_s is None:
            track.settle()
        targets = self.run_spec.targets.get(track.source.klass, NO_TARGETS)
        if self.run_spec.deadline_is_target and targets.ttft_s is None and track.deadline_s is not None:
            ttft_s = track.deadline_s - track.request.arrival_s
            targets = targets.model_copy(update={"ttft_s": ttft_s})
        return later(record_of(track, targets), self.instance.serving)
