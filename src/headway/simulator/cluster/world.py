"""The cluster's event loop: a virtual clock, and a heap of what happens next.

At one instant spans end or pause first, then batches, then transfers, then timers, then clients leave, then requests
arrive; a policy is told each in turn and its actions are carried out at once. Then whatever can begin begins: spans,
holds and requests whose turn it is, transfers, batches. Nothing depends on the order of a dictionary.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from headway.core.request import Request, Slo
from headway.metrics import NO_TARGETS
from headway.placement.base import (
    Arrived,
    Dropped,
    Event,
    Finished,
    KvReady,
    Paused,
    Placement,
    SpanDone,
    Woken,
)
from headway.placement.view import ClusterBook, ClusterView
from headway.simulator.cluster.actions import Actions
from headway.simulator.cluster.engine import Engine
from headway.simulator.cluster.journey import Journey
from headway.simulator.cluster.lanes import Entry
from headway.simulator.cluster.result import Bar, BarKind, ClusterResult
from headway.simulator.cluster.spans import SpanRun
from headway.simulator.cluster.spec import ClusterSpec
from headway.simulator.cluster.transfers import Piece
from headway.simulator.noise import NoiseSource
from headway.simulator.result import ReplicaUse, SimResult
from headway.simulator.run import Told
from headway.simulator.spec import RunSpec
from headway.workload import TraceRequest

SPAN, STEP, SENT, TIMER, LEAVE, ARRIVE = range(6)
NEVER = float("inf")


def simulate_cluster(
    spec: ClusterSpec,
    placement: Placement,
    workload: Iterable[TraceRequest],
    run: RunSpec = RunSpec(),  # noqa: B008 - frozen
    *,
    keep_bars: bool = False,
    told: Told | None = None,
    stopwatch: Callable[[], float] | None = None,
) -> ClusterResult:
    """Run a workload to its end, or to the end of the window. Deterministic.

    stopwatch: read around every call of the policy.
    """
    world = World(spec, placement, sorted(workload, key=lambda r: r.arrival_s), run, keep_bars, stopwatch)
    return world.run(told)


class World:
    """One run. `actions` carries out what the policy wants; this class lets time pass."""

    def __init__(
        self,
        spec: ClusterSpec,
        placement: Placement,
        workload: list[TraceRequest],
        run: RunSpec,
        keep_bars: bool = False,
        stopwatch: Callable[[], float] | None = None,
    ) -> None:
        self.spec, self.placement, self.how = spec, placement, run
        self.book = ClusterBook(spec.instances, spec.links)
        self.end_s = run.window_s if run.window_s is not None else NEVER
        self.arrivals = [request for request in workload if request.arrival_s < self.end_s]
        self.now = 0.0
        self.journeys: dict[str, Journey] = {}
        self.news: deque[Event] = deque()
        self.bars: list[Bar] | None = [] if keep_bars else None
        self.noise = NoiseSource(run.noise, f"noise {run.seed} spans")
        self.engines: dict[tuple[int, ...], Engine] = {}
        self.busy_s = [0.0] * len(spec.instances)
        self.spans = self.chunked = self.paused = self.refused = 0
        self.decisions: list[float] = []
        self._heap: list[tuple[float, int, int, Any]] = []
        self._serial = 0
        self._batching: dict[int, tuple[float, int]] = {}
        self._timer_s = NEVER
        self._stopwatch = stopwatch
        self._patience = random.Random(f"patience {run.seed}")
        self.actions = Actions(self)

    # -- time -------------------------------------------------------------------------------------------------------

    def push(self, at_s: float, kind: int, what: Any) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, kind, self._serial, what))

    def run(self, told: Told | None = None) -> ClusterResult:
        heap, following, count, beats = self._heap, 0, len(self.arrivals), 0
        while True:
            arrival_s = self.arrivals[following].arrival_s if following < count else NEVER
            now = min(heap[0][0] if heap else NEVER, arrival_s)
            if now == NEVER or now > self.end_s:
                break
            self.now = now
            while heap and heap[0][0] == now:
                _, kind, _, what = heapq.heappop(heap)
                self._happen(kind, what)
                self._tell()
            while arrival_s == now:
                self._arrive(self.arrivals[following])
                self._tell()
                following += 1
                arrival_s = self.arrivals[following].arrival_s if following < count else NEVER
            self._settle()
            beats += 1
            if told is not None and not beats & 0x3FF:
                told(now, sum(j.ended_s is not None for j in self.journeys.values()))
        return self._result()

    def _happen(self, kind: int, what: Any) -> None:
        if kind == SPAN:
            word, subject, *rest = what
            if subject.payload.serial == rest[0] and subject.state == "running":
                self._span_done(subject) if word == "done" else self._span_paused(subject, rest[1])
        elif kind == STEP:
            engine, batch = what
            self._step(engine, batch)
        elif kind == SENT:
            self._sent(what)
        elif kind == TIMER:
            if what == self._timer_s:
                self._timer_s = NEVER
                self.news.append(Woken())
        elif kind == LEAVE:
            journey, why = what
            if journey.ended_s is None:
                self.drop(journey, why)

    def _tell(self) -> None:
        """Tell the policy all news, and do what it wants."""
        while self.news:
            event = self.news.popleft()
            self.actions.flush()
            view = ClusterView(self.book, self.now)
            if self._stopwatch is None:
                wanted = self.placement.on_event(event, view)
            else:
                began = self._stopwatch()
                wanted = self.placement.on_event(event, view)
                self.decisions.append(self._stopwatch() - began)
            for action in wanted:
                self.actions.do(action)

    def _settle(self) -> None:
        """Let begin what can, until nothing more does."""
        while True:
            began = self.actions.begin()
            self._tell()
            if not began and not self.news:
                break
        for engine, at_s, batch in self.actions.pump():
            if self.bars is not None and batch >= 0:
                self._batching[engine.index] = (self.now, self._batching.get(engine.index, (0.0, -1))[1])
            self.push(at_s, STEP, (engine, batch))
        self.actions.flush()
        wake_s = self.placement.next_wakeup(self.now)
        if wake_s is not None and wake_s != self._timer_s and wake_s < NEVER:
            self._timer_s = max(wake_s, self.now)
            self.push(self._timer_s, TIMER, self._timer_s)

    # -- what happens -----------------------------------------------------------------------------------------------

    def _arrive(self, source: TraceRequest) -> None:
        number, how = len(self.journeys), self.how
        targets = how.targets.get(source.klass, NO_TARGETS)
        request = Request(
            id=f"r{number}",
            arrival_s=source.arrival_s,
            prompt_tokens=max(1, source.prompt_tokens),
            max_output_tokens=max(1, source.output_tokens, how.max_output or 0),
            cached_tokens=max(0, min(source.cached_tokens, source.prompt_tokens - 1)),
            slo=Slo(ttft_s=targets.ttft_s, tbt_s=targets.tbt_s) if how.told else Slo(),
        )
        journey = Journey(number, request, source)
        self.journeys[request.id] = journey
        self.book.arrived(self.now)
        waits = [] if how.timeout_s is None else [(how.timeout_s, "timeout")]
        if how.patience_s is not None:
            waits.append((self._patience.expovariate(1.0 / how.patience_s), "aborted"))
        if waits:
            wait_s, why = min(waits)
            self.push(self.now + wait_s, LEAVE, (journey, why))
        self.news.append(Arrived(request))

    def _span_done(self, entry: Entry) -> None:
        run: SpanRun = entry.payload  # type: ignore[assignment]
        self._count(entry, run, "span")
        self.actions.ended(entry)
        for member in (entry, *run.along):
            journey = self.journeys[member.owner]
            if journey.ended_s is not None:
                continue
            last = member.payload.last  # type: ignore[attr-defined]
            if last:
                self.token(journey)
            self.news.append(SpanDone(member.owner, run.index, last))
            if last and journey.left <= 0:
                self.finish(journey)

    def _span_paused(self, entry: Entry, layer: int) -> None:
        run: SpanRun = entry.payload  # type: ignore[assignment]
        self._count(entry, run, "span")
        run.layer, run.extra_s = layer, 0.0
        self.paused += 1
        self.actions.park(entry)
        self.news.append(Paused(entry.owner, run.index, run.progress()))

    def _count(self, entry: Entry, run: SpanRun, kind: BarKind) -> None:
        """A span runs no longer."""
        self.actions.occupy(entry.group, -1)
        for i in entry.group:
            self.bar(kind, i, run.began_s, entry.owner, f"{run.span.start}:{run.span.end}")

    def _step(self, engine: Engine, batch: int) -> None:
        if batch >= 0 and engine.replica.flying(batch):
            self._batch_bar(engine)
            self.actions.occupy(engine.group, -1)
            for track in engine.complete(batch, self.now):
                self.actions.stayed(self.journeys[track.request.id], track)
        self.actions.touch(engine.group, engine)

    def _sent(self, piece: Piece) -> None:
        if self.actions.too_early(piece):
            return
        self.bar("transfer", piece.source, piece.began_s, piece.request, f"to {piece.target}")
        journey = self.journeys[piece.request]
        if self.actions.transfers.finish(piece) and journey.ended_s is None and not self.actions.more_to_send(journey):
            self.news.append(KvReady(piece.request, piece.target))

    def token(self, journey: Journey) -> None:
        """A token came out of a span."""
        journey.times.append(self.now)

    def finish(self, journey: Journey) -> None:
        """All output is there."""
        journey.ended_s = self.now
        self.actions.forget(journey)
        self.news.append(Finished(journey.request.id))

    def drop(self, journey: Journey, why: str) -> None:
        """A request ends without all of its output."""
        self.actions.forget(journey)
        journey.ended_s, journey.error = self.now, why
        self.news.append(Dropped(journey.request.id, why))

    def _batch_bar(self, engine: Engine) -> None:
        """A batch ends; batches without a break between them are one bar."""
        if self.bars is None:
            return
        since, last = self._batching.get(engine.index, (self.now, -1))
        group = engine.group
        if last >= 0 and self.bars[last].end_s == since:
            first = self.bars[last].start_s
            self.bars[last : last + len(group)] = [Bar("batch", i, first, self.now, "") for i in group]
        else:
            last = len(self.bars)
            self.bars += [Bar("batch", i, since, self.now, "") for i in group]
        self._batching[engine.index] = (self.now, last)

    def bar(self, kind: BarKind, instance: int, start_s: float, request: str, note: str = "") -> None:
        """Keep a bar that ends now."""
        if self.bars is not None and self.now > start_s:
            self.bars.append(Bar(kind, instance, start_s, self.now, request, note))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _result(self) -> ClusterResult:
        end_s = self.how.window_s if self.how.window_s is not None else self.now
        first_s = 0.0 if self.how.window_s is not None else (self.arrivals[0].arrival_s if self.arrivals else 0.0)
        self.now = min(max(self.now, 0.0), end_s) if self.how.window_s is None else end_s
        for entry in {id(e): e for e in self.actions.lanes.running if e is not None}.values():
            self._count(entry, entry.payload, "span")  # type: ignore[arg-type]
        self.actions.settle_busy()
        records = tuple(
            journey.record(self.how.targets.get(journey.source.klass, NO_TARGETS)) for journey in self.journeys.values()
        )
        uses = [self._use(i, end_s) for i in range(len(self.spec.instances))]
        sim = SimResult(records=records, replicas=tuple(uses), duration_s=end_s - first_s)
        return ClusterResult(
            sim=sim,
            instances=self.spec.instances,
            bars=tuple(self.bars or ()),
            spans=self.spans,
            chunked=self.chunked,
            paused=self.paused,
            refused=self.refused,
            busy_s=tuple(use.busy_s for use in uses),
            decision_s=tuple(self.decisions),
        )

    def _use(self, instance: int, end_s: float) -> ReplicaUse:
        """What one instance did: its share of spans and its schedulers' work."""
        total = ReplicaUse(
            iterations=0, batches=0, busy_s=self.busy_s[instance], prefill_tokens=0, decode_tokens=0, kv_read_tokens=0,
            attention_pairs=0.0, preemptions=0, recomputed_tokens=0, kv_peak_tokens=0,
        )  # fmt: skip
        for engine in self.engines.values():
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
