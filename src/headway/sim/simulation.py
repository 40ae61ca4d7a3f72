"""Simulation of equal instances behind one queue: `simulate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headway.core.errors import ConfigError, PredictedLateError, RequestError
from headway.core.event_log import EventSink
from headway.sim.decode_cohorts import DecodeTrack
from headway.sim.event_loop import EventKind, EventLoop, OnProgress
from headway.sim.metrics import NO_TARGETS, RequestRecord, SloTargets
from headway.sim.noise import NoiseSource
from headway.sim.records import later, record_of
from headway.sim.replica import SimulatedEngine
from headway.sim.result import IterationRecord, SimResult
from headway.sim.spec import InstanceSpec, RunSpec
from headway.sim.vllm.engine import SimulatedVllm
from headway.sim.workload import TraceRequest


def simulate(
    instance: InstanceSpec,
    workload: Iterable[TraceRequest],
    run: RunSpec = RunSpec(),  # noqa: B008 - frozen
    *,
    on_progress: OnProgress | None = None,
    stopwatch: Callable[[], float] | None = None,
    log: EventSink | None = None,
) -> SimResult:
    """Run a workload to its end, or to the end of the window. Deterministic.

    `stopwatch` (such as time.perf_counter) is read around every decision, for `ReplicaUse.scheduling_s`; it changes
    nothing else. `log`: receives the event log of the one replica; raises ConfigError where there are several.
    """
    simulation = InstanceSimulation(instance, workload, run, stopwatch, log)
    simulation.run_events(on_progress)
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

    @property
    def ended(self) -> int:
        return sum(track.ended_s is not None for track in self.tracks)

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
        track, why = what
        if track.ended_s is None:
            self.replicas[track.replica].abort(track, self.now, why)
            self._changed.add(track.replica)
            self._interrupt(self.replicas[track.replica])
            self.schedule_next_turn(track.source)

    def _interrupt(self, replica: SimulatedEngine | SimulatedVllm) -> None:
        """Let an arrival or a departure interrupt a batch that may be."""
        stopped = replica.interrupt(self.now) if isinstance(replica, SimulatedEngine) else None
        if stopped is not None:
            at_s, batch = stopped
            self.schedule(at_s, EventKind.BATCH_END, (replica.index, batch))

    def on_arrival(self, source: TraceRequest) -> None:
        track = DecodeTrack(self.request_of(source, len(self.tracks)), source)
        self.tracks.append(track)
        replica = self.replicas[0]
        if len(self.replicas) > 1:
            # join the shortest queue; ties go to the lowest index
            replica = min(self.replicas, key=lambda r: (len(r.tracks), r.index))
        try:
            replica.add(track, self.now)
        except (RequestError, PredictedLateError) as error:
            track.ended_s, track.error, track.rejected = self.now, str(error), True
            self.schedule_next_turn(source)
            return
        self._changed.add(replica.index)
        self._interrupt(replica)
        self.schedule_departure(track)

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
            targets = SloTargets(ttft_s, targets.tbt_s, targets.tpot_s, targets.e2e_s)
        return later(record_of(track, targets), self.instance.serving)
