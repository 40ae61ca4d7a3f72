"""Simulation of a cluster: `simulate_cluster`.

The real controller and placement policy decide; spans and schedulers take predicted times (`SimulatedBackend`). The
policy receives each event in turn and its actions are carried out at once. At the end of an instant the controller
starts spans, grants holds, admits queued requests and starts transfers; then the engines start batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from headway.control.controller import ClusterController
from headway.control.entries import KvSlice, SpanEntry
from headway.control.log import RecordingController
from headway.core.logs import EventSink
from headway.perf.latency.groups import PausePoints
from headway.policy.placement.contract import ClusterState, PlacementPolicy, too_long
from headway.sim.cluster.backend import SimulatedBackend, SimulatedSpan, count_work
from headway.sim.cluster.state import BarKind, ClusterResult, ClusterSpec, GanttBar, SimRequest, SimulatedInstance
from headway.sim.loop import NEVER, EventKind, EventLoop
from headway.sim.metrics import NO_TARGETS
from headway.sim.prefix_cache import sum_of
from headway.sim.result import WORK, ReplicaUse, SimResult
from headway.sim.spec import RunSpec
from headway.sim.workload import TraceRequest


def simulate_cluster(
    spec: ClusterSpec,
    placement: PlacementPolicy,
    workload: Iterable[TraceRequest],
    run: RunSpec = RunSpec(),  # noqa: B008 - frozen
    *,
    keep_bars: bool = False,
    stopwatch: Callable[[], float] | None = None,
    record: EventSink | None = None,
) -> ClusterResult:
    """Run a workload to its end, or to the end of the window. Deterministic.

    stopwatch: read around every call of the policy. record: receives the events of `control.log`.
    """
    simulation = ClusterSimulation(spec, placement, workload, run, keep_bars, stopwatch, record)
    simulation.run_events()
    return simulation.result()


class ClusterSimulation(EventLoop):
    """One run: the event loop of a controller whose backend is simulated."""

    def __init__(
        self,
        spec: ClusterSpec,
        placement: PlacementPolicy,
        workload: Iterable[TraceRequest],
        run: RunSpec,
        keep_bars: bool = False,
        stopwatch: Callable[[], float] | None = None,
        record: EventSink | None = None,
    ) -> None:
        super().__init__(workload, run)
        self.spec = spec
        self.state = ClusterState(spec.instances, spec.links)
        self.requests: list[SimRequest] = []
        self.bars: list[GanttBar] | None = [] if keep_bars else None
        self.paused = 0
        """Preemptions of spans so far."""
        # by engine: start of its last batch, and the index of the bar that the batch may continue
        self._last_batch: dict[int, tuple[float, int]] = {}
        # time of the policy's next wakeup; timer events of other times are stale
        self._timer_s = NEVER
        self.backend = SimulatedBackend(self)
        self.controller = (ClusterController if record is None else partial(RecordingController, sink=record))(
            self.state,
            self.backend,
            placement,
            layers=spec.shape.layers,
            receive_backends=spec.backends,
            order=spec.handshake,
            stopwatch=stopwatch,
        )
        # thousands of slices may wait for blocks
        self.controller.state.transfers.parks = spec.kv_reservations

    def on_event(self, kind: EventKind, what: Any) -> None:
        if kind == EventKind.SPAN_END:
            outcome, entry, *rest = what
            # stale: the span was paused or stopped after this end was scheduled
            if entry.backend_state.serial == rest[0] and entry.state == "running":
                self._span_done(entry) if outcome == "done" else self._span_paused(entry, *rest[1:])
        elif kind == EventKind.BATCH_END:
            engine, batch = what
            self._batch_end(engine, batch)
        elif kind == EventKind.KV_SENT:
            self._kv_sent(what)
        elif kind == EventKind.PREFIX_COPIED:
            self.backend.prefix_copies.arrived(*what)
        elif kind == EventKind.TIMER:
            if what == self._timer_s:
                self._timer_s = NEVER
                self.controller.woken(self.now)
        elif kind == EventKind.CLIENT_LEAVES:
            controlled, why = what
            self.controller.drop(controlled, why, self.now)
        self.controller.deliver_events()

    def on_arrival(self, source: TraceRequest) -> None:
        request = SimRequest(self.request_of(source, len(self.requests)), source)
        self.requests.append(request)
        why = too_long(request.request.prompt_tokens, request.request.max_output_tokens, self.spec.longest)
        if why is not None:
            request.ended_s, request.error, request.rejected = self.now, why, True
            self.schedule_next_turn(source)
            return
        self.schedule_departure(
            self.controller.arrive(request.request, self.now, request, self.backend.prefix_copies.cached_tokens(source))
        )
        self.controller.deliver_events()

    def on_instant_end(self) -> None:
        wake_s = self.controller.settle(self.now)
        kv = self.backend.kv
        # requests that wait for each other's blocks: the youngest gives way
        while kv is not None and (name := kv.gives_way(self.backend.claims)) is not None:
            why = "waits for KV room that no other request will free"
            self.controller.drop(self.controller.requests[name], why, self.now)
            wake_s = self.controller.settle(self.now)
        if wake_s is not None and wake_s != self._timer_s and wake_s < NEVER:
            # a wakeup in the past is due now; a heap entry is not removed but becomes stale
            self._timer_s = max(wake_s, self.now)
            self.schedule(self._timer_s, EventKind.TIMER, self._timer_s)

    def batch_begun(self, engine: SimulatedInstance, at_s: float, batch: int) -> None:
        """Schedule the end of a batch that begins now. `batch` -1: `at_s` is when stage 0 becomes free."""
        if self.bars is not None and batch >= 0:
            self._last_batch[engine.index] = (self.now, self._last_batch.get(engine.index, (0.0, -1))[1])
        self.schedule(at_s, EventKind.BATCH_END, (engine, batch))

    # -- events -----------------------------------------------------------------------------------------------------

    def _span_done(self, entry: SpanEntry) -> None:
        self._count(entry, "span")
        over = set()
        # all requests of a batch end together
        for member in (*entry.batched_with, entry):
            self.backend.transfers.send_deferred(member, self.now)
            # the last span of a prompt yields the first output token
            if member.last and not member.controlled.ended:
                request: SimRequest = member.controlled.backend_state
                request.times.append(self.now)
                if request.missing_tokens <= 0:
                    over.add(member.owner)
        self.controller.span_done(entry, self.now, over)

    def _span_paused(self, entry: SpanEntry, edges: PausePoints, tokens: int, layer: int) -> None:
        self._count(entry, "span")
        self.paused += 1
        self.backend.paused(entry, self.now)
        # computed in one piece: whole layers are done, for all tokens of the span
        if len(edges.pieces) == 1:
            self.controller.span_paused(entry, layer, self.now)
        else:
            self.controller.span_paused(entry, layer, self.now, tokens, edges.elapsed_share(tokens, layer))

    def _count(self, entry: SpanEntry, kind: BarKind) -> None:
        """Account for a span that has ended or paused: busy time, work and Gantt bar."""
        run: SimulatedSpan = entry.backend_state
        self.backend.busy.end(entry.group, self.now)
        share = run.computed_share(entry, self.now)
        for member in (entry, *entry.batched_with):
            count_work(self.backend.work, self.spec, member.span, share)
        for i in entry.group:
            self.bar(kind, i, run.began_s, entry.owner, f"{entry.span.start}:{entry.span.end}")

    def _batch_end(self, engine: SimulatedInstance, batch: int) -> None:
        # -1 is the release of stage 0; a batch whose repetitions were cut short completed before this event
        if batch >= 0 and engine.replica.is_in_flight(batch):
            self._batch_bar(engine, batch)
            self.backend.busy.end(engine.group, self.now)
            for track in engine.complete(batch, self.now):
                controlled = self.controller.requests[track.owner]
                request: SimRequest = controlled.backend_state
                request.take_tokens(track)
                if self.backend.kv is not None and request.missing_tokens > 0:
                    self.backend.kv.spread(track.owner, engine.group, request.kv_tokens)
                self.controller.left_scheduler(controlled, len(request.times), request.missing_tokens <= 0, self.now)
        self.backend.on_batch_end(engine)
        self.controller.changed(engine.group, self.now)

    def _kv_sent(self, kv_slice: KvSlice) -> None:
        if not self.backend.transfers.defer(kv_slice):
            self.bar("transfer", kv_slice.source, kv_slice.began_s, kv_slice.request, f"to {kv_slice.target}")
            self.controller.sent(kv_slice, self.now)

    def _batch_bar(self, engine: SimulatedInstance, batch: int) -> None:
        """Keep the bar of a batch that ends. Batches of the same prompt without a break between them share one bar, as
        do those that only decode."""
        if self.bars is None:
            return
        computed = [(done, name) for name, done, _ in engine.replica.prompt_progress(batch)]
        # A request that came back to an instance has another id there.
        longest = max(computed)[1].rstrip("'") if computed else ""
        since, last = self._last_batch.get(engine.index, (self.now, -1))
        group = engine.group
        if last >= 0 and self.bars[last].end_s == since and self.bars[last].request == longest:
            since = self.bars[last].start_s
        else:
            last = len(self.bars)
        # one bar for each instance of the group, next to each other in the list
        self.bars[last : last + len(group)] = [GanttBar("batch", i, since, self.now, longest) for i in group]
        self._last_batch[engine.index] = (self.now, last)

    def bar(self, kind: BarKind, instance: int, start_s: float, request: str, note: str = "") -> None:
        """Keep a Gantt bar that ends now; empty ones are left out."""
        if self.bars is not None and self.now > start_s:
            self.bars.append(GanttBar(kind, instance, start_s, self.now, request, note))

    # -- the end ----------------------------------------------------------------------------------------------------

    def result(self) -> ClusterResult:
        """Return the result of the run, up to the window's end or the last event."""
        end_s, duration_s = self.observed_s(self.now)
        self.now = end_s
        # spans cut off by the window: an entry runs on every instance of its group, count it once
        for entry in {id(e): e for e in self.controller.queues.running if isinstance(e, SpanEntry)}.values():
            self._count(entry, "span")
        self.backend.busy.close(self.now)
        targets = self.run_spec.targets
        serving = self.spec.serving
        records = tuple(one.record(targets.get(one.source.klass, NO_TARGETS), serving) for one in self.requests)
        uses = [self._use(i, end_s) for i in range(len(self.spec.instances))]
        sim = SimResult(
            records=records,
            replicas=tuple(uses),
            duration_s=duration_s,
            utilisation_base=self.spec.utilisation_base,
            spans=self.backend.work,
        )
        return ClusterResult(
            sim=sim,
            instances=self.spec.instances,
            bars=tuple(self.bars or ()),
            spans=self.backend.spans,
            chunked=self.backend.chunked,
            paused=self.paused,
            refused=self.controller.refused,
            busy_s=tuple(use.busy_s for use in uses),
            decision_s=tuple(self.controller.decision_s),
        )

    def _use(self, instance: int, end_s: float) -> ReplicaUse:
        """Return the counters of one instance: its busy time and the work of the schedulers on it."""
        total = ReplicaUse(busy_s=self.backend.busy.seconds[instance])
        for engine in self.backend.engines.values():
            if instance not in engine.group:
                continue
            use = engine.replica.use(end_s)
            total = replace(total, kv_peak_tokens=max(total.kv_peak_tokens, use.kv_peak_tokens))
            # a group's work counts on its first instance only, so that sums over instances are right
            if engine.group[0] == instance:
                sums = {name: getattr(total, name) + getattr(use, name) for name in WORK}
                total = replace(total, **sums, prefix_cache=sum_of(total.prefix_cache, use.prefix_cache))
        if instance == 0:
            spans = self.backend.prefix_copies.use_of_spans(self.backend.engines.values())
            total = replace(total, prefix_cache=sum_of(total.prefix_cache, spans))
        return total
