"""The cluster's event loop: a virtual clock, and a heap of what happens next.

At one instant spans end or pause first, then batches, then transfers, then timers, then clients leave, then requests
arrive; a policy is told each in turn and its actions are carried out at once. Then whatever can begin begins: spans,
holds and requests whose turn it is, transfers, batches. Nothing depends on the order of a dictionary.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from headway.control.controller import ClusterController
from headway.control.decision_log import RecordingController, Sink
from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.core.request import Request, Slo
from headway.perf.latency.pause_points import PausePoints
from headway.policy.placement.base import PlacementPolicy
from headway.policy.placement.view import ClusterState
from headway.sim.cluster.backend import SimulatedBackend
from headway.sim.cluster.instance import SimulatedInstance
from headway.sim.cluster.request import SimRequest
from headway.sim.cluster.result import BarKind, ClusterResult, GanttBar
from headway.sim.cluster.spans import SimulatedSpan
from headway.sim.cluster.spec import ClusterSpec
from headway.sim.event_loop import OnProgress
from headway.sim.metrics import NO_TARGETS
from headway.sim.result import ReplicaUse, SimResult
from headway.sim.spec import RunSpec
from headway.sim.workload import TraceRequest

SPAN, STEP, SENT, TIMER, LEAVE, ARRIVE = range(6)
NEVER = float("inf")


def simulate_cluster(
    spec: ClusterSpec,
    placement: PlacementPolicy,
    workload: Iterable[TraceRequest],
    run: RunSpec = RunSpec(),  # noqa: B008 - frozen
    *,
    keep_bars: bool = False,
    on_progress: OnProgress | None = None,
    stopwatch: Callable[[], float] | None = None,
    record: Sink | None = None,
) -> ClusterResult:
    """Run a workload to its end, or to the end of the window. Deterministic.

    stopwatch: read around every call of the policy. record: takes a log of all that happens (`control.decision_log`).
    """
    world = ClusterWorld(
        spec, placement, sorted(workload, key=lambda r: r.arrival_s), run, keep_bars, stopwatch, record
    )
    return world.run(on_progress)


class ClusterWorld:
    """One run: lets time pass for a machine's hands."""

    def __init__(
        self,
        spec: ClusterSpec,
        placement: PlacementPolicy,
        workload: list[TraceRequest],
        run: RunSpec,
        keep_bars: bool = False,
        stopwatch: Callable[[], float] | None = None,
        record: Sink | None = None,
    ) -> None:
        self.spec, self.how = spec, run
        self.book = ClusterState(spec.instances, spec.links)
        self.end_s = run.window_s if run.window_s is not None else NEVER
        self.arrivals = [request for request in workload if request.arrival_s < self.end_s]
        self.now = 0.0
        self.trips: list[SimRequest] = []
        self.bars: list[GanttBar] | None = [] if keep_bars else None
        self.paused = 0
        self._heap: list[tuple[float, int, int, Any]] = []
        self._serial = 0
        self._batching: dict[int, tuple[float, int]] = {}
        self._timer_s = NEVER
        self._patience = random.Random(f"patience {run.seed}")
        self.hands = SimulatedBackend(self)
        self.machine = (ClusterController if record is None else partial(RecordingController, sink=record))(
            self.book,
            self.hands,
            placement,
            layers=spec.shape.layers,
            backends=spec.backends,
            order=spec.handshake,
            stopwatch=stopwatch,
        )

    # -- time -------------------------------------------------------------------------------------------------------

    def push(self, at_s: float, kind: int, what: Any) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, kind, self._serial, what))

    def run(self, on_progress: OnProgress | None = None) -> ClusterResult:
        heap, following, count, beats, tell = self._heap, 0, len(self.arrivals), 0, self.machine.tell
        while True:
            arrival_s = self.arrivals[following].arrival_s if following < count else NEVER
            now = min(heap[0][0] if heap else NEVER, arrival_s)
            if now == NEVER or now > self.end_s:
                break
            self.now = now
            while heap and heap[0][0] == now:
                _, kind, _, what = heapq.heappop(heap)
                self._happen(kind, what)
                tell()
            while arrival_s == now:
                self._arrive(self.arrivals[following])
                tell()
                following += 1
                arrival_s = self.arrivals[following].arrival_s if following < count else NEVER
            self._settle()
            beats += 1
            if on_progress is not None and not beats & 0x3FF:
                on_progress(now, sum(trip.ended_s is not None for trip in self.trips))
        return self._result()

    def _happen(self, kind: int, what: Any) -> None:
        if kind == SPAN:
            word, entry, *rest = what
            if entry.driver.serial == rest[0] and entry.state == "running":
                self._span_done(entry) if word == "done" else self._span_paused(entry, *rest[1:])
        elif kind == STEP:
            engine, batch = what
            self._step(engine, batch)
        elif kind == SENT:
            self._sent(what)
        elif kind == TIMER:
            if what == self._timer_s:
                self._timer_s = NEVER
                self.machine.woken(self.now)
        elif kind == LEAVE:
            journey, why = what
            self.machine.drop(journey, why, self.now)

    def _settle(self) -> None:
        """Let begin what can."""
        wake_s = self.machine.settle(self.now)
        if wake_s is not None and wake_s != self._timer_s and wake_s < NEVER:
            self._timer_s = max(wake_s, self.now)
            self.push(self._timer_s, TIMER, self._timer_s)

    def pumped(self, engine: SimulatedInstance, at_s: float, batch: int) -> None:
        """A batch has begun (-1: stage 0 will be free): come back then."""
        if self.bars is not None and batch >= 0:
            self._batching[engine.index] = (self.now, self._batching.get(engine.index, (0.0, -1))[1])
        self.push(at_s, STEP, (engine, batch))

    # -- what happens -----------------------------------------------------------------------------------------------

    def _arrive(self, source: TraceRequest) -> None:
        number, how = len(self.trips), self.how
        targets = how.targets.get(source.klass, NO_TARGETS)
        request = Request(
            id=f"r{number}",
            arrival_s=source.arrival_s,
            prompt_tokens=max(1, source.prompt_tokens),
            max_output_tokens=max(1, source.output_tokens, how.max_output or 0),
            cached_tokens=max(0, min(source.cached_tokens, source.prompt_tokens - 1)),
            slo=Slo(ttft_s=targets.ttft_s, tbt_s=targets.tbt_s) if how.told else Slo(),
        )
        trip = SimRequest(request, source)
        self.trips.append(trip)
        journey = self.machine.arrive(request, self.now, trip)
        waits = [] if how.timeout_s is None else [(how.timeout_s, "timeout")]
        if how.patience_s is not None:
            waits.append((self._patience.expovariate(1.0 / how.patience_s), "aborted"))
        if waits:
            wait_s, why = min(waits)
            self.push(self.now + wait_s, LEAVE, (journey, why))

    def _span_done(self, entry: SpanEntry) -> None:
        self._count(entry, "span")
        over = set()
        for member in (*entry.along, entry):
            self.hands.send_late(member, self.now)
            if member.last and not member.journey.ended:
                trip: SimRequest = member.journey.driver
                trip.times.append(self.now)
                if trip.left <= 0:
                    over.add(member.owner)
        self.machine.span_done(entry, self.now, over)

    def _span_paused(self, entry: SpanEntry, edges: PausePoints, tokens: int, layer: int) -> None:
        self._count(entry, "span")
        self.paused += 1
        self.hands.paused(entry, self.now)
        if len(edges.pieces) == 1:
            self.machine.span_paused(entry, layer, self.now)
        else:
            self.machine.span_paused(entry, layer, self.now, tokens, edges.elapsed_share(tokens, layer))

    def _count(self, entry: SpanEntry, kind: BarKind) -> None:
        """A span runs no longer."""
        run: SimulatedSpan = entry.driver
        self.hands.occupy(entry.group, -1)
        for i in entry.group:
            self.bar(kind, i, run.began_s, entry.owner, f"{entry.span.start}:{entry.span.end}")

    def _step(self, engine: SimulatedInstance, batch: int) -> None:
        if batch >= 0 and engine.replica.flying(batch):
            self._batch_bar(engine)
            self.hands.occupy(engine.group, -1)
            for track in engine.complete(batch, self.now):
                journey = self.machine.journeys[track.request.id]
                trip: SimRequest = journey.driver
                trip.take(track)
                self.machine.stayed(journey, len(trip.times), trip.left <= 0, self.now)
        self.hands.stepped(engine)
        self.machine.changed(engine.group, self.now)

    def _sent(self, piece: KvSlice) -> None:
        if not self.hands.too_early(piece):
            self.bar("transfer", piece.source, piece.began_s, piece.request, f"to {piece.target}")
            self.machine.sent(piece, self.now)

    def _batch_bar(self, engine: SimulatedInstance) -> None:
        """A batch ends; batches without a break between them are one bar."""
        if self.bars is None:
            return
        since, last = self._batching.get(engine.index, (self.now, -1))
        group = engine.group
        if last >= 0 and self.bars[last].end_s == since:
            first = self.bars[last].start_s
            self.bars[last : last + len(group)] = [GanttBar("batch", i, first, self.now, "") for i in group]
        else:
            last = len(self.bars)
            self.bars += [GanttBar("batch", i, since, self.now, "") for i in group]
        self._batching[engine.index] = (self.now, last)

    def bar(self, kind: BarKind, instance: int, start_s: float, request: str, note: str = "") -> None:
        """Keep a bar that ends now."""
        if self.bars is not None and self.now > start_s:
            self.bars.append(GanttBar(kind, instance, start_s, self.now, request, note))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _result(self) -> ClusterResult:
        end_s = self.how.window_s if self.how.window_s is not None else self.now
        first_s = 0.0 if self.how.window_s is not None else (self.arrivals[0].arrival_s if self.arrivals else 0.0)
        self.now = min(max(self.now, 0.0), end_s) if self.how.window_s is None else end_s
        for entry in {id(e): e for e in self.machine.lanes.running if isinstance(e, SpanEntry)}.values():
            self._count(entry, "span")
        self.hands.settle_busy()
        records = tuple(trip.record(self.how.targets.get(trip.source.klass, NO_TARGETS)) for trip in self.trips)
        uses = [self._use(i, end_s) for i in range(len(self.spec.instances))]
        sim = SimResult(records=records, replicas=tuple(uses), duration_s=end_s - first_s)
        return ClusterResult(
            sim=sim,
            instances=self.spec.instances,
            bars=tuple(self.bars or ()),
            spans=self.hands.spans,
            chunked=self.hands.chunked,
            paused=self.paused,
            refused=self.machine.refused,
            busy_s=tuple(use.busy_s for use in uses),
            decision_s=tuple(self.machine.decision_s),
        )

    def _use(self, instance: int, end_s: float) -> ReplicaUse:
        """What one instance did: its share of spans and its schedulers' work."""
        total = ReplicaUse(
            iterations=0, batches=0, busy_s=self.hands.busy_for_s[instance], prefill_tokens=0, decode_tokens=0,
            kv_read_tokens=0, attention_pairs=0.0, preemptions=0, recomputed_tokens=0, kv_peak_tokens=0,
        )  # fmt: skip
        for engine in self.hands.engines.values():
            if instance not in engine.group:
                continue
            use, first = engine.replica.use(end_s), engine.group[0] == instance
            total = replace(
                total,
                iterations=total.iterations + (use.iterations if first else 0),
                batches=total.batches + (use.batches if first else 0),
                prefill_tokens=total.prefill_tokens + (use.prefill_tokens if first else 0),
                decode_tokens=total.decode_tokens + (use.decode_tokens if first else 0),
                preemptions=total.preemptions + (use.preemptions if first else 0),
                recomputed_tokens=total.recomputed_tokens + (use.recomputed_tokens if first else 0),
                kv_peak_tokens=max(total.kv_peak_tokens, use.kv_peak_tokens),
            )
        return total
