"""The event loop: a virtual clock, and a heap of what happens next.

Events are taken in order of (time, priority, id). At one instant batches complete first (0), then stages free (1), then
clients leave (2), then requests arrive (3), each in order of its id; only then does any replica schedule. The order is
part of the result: nothing depends on how a dictionary or a float happened to fall.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence

from headway.core.errors import RequestError
from headway.core.request import Request, Slo
from headway.sim.decode_cohorts import DecodeTrack
from headway.sim.metrics import NO_TARGETS, RequestRecord, SloTargets
from headway.sim.noise import NoiseSource
from headway.sim.records import record_of
from headway.sim.replica import SimulatedEngine
from headway.sim.result import IterationRecord, SimResult
from headway.sim.spec import InstanceSpec, RunSpec
from headway.sim.workload import TraceRequest

COMPLETE, STAGE_FREE, LEAVE, ARRIVE = range(4)
NEVER = float("inf")

OnProgress = Callable[[float, int], None]
"""Told now and then how far a run is: (virtual seconds, requests ended)."""


def simulate(
    instance: InstanceSpec,
    workload: Iterable[TraceRequest],
    run: RunSpec = RunSpec(),  # noqa: B008 - frozen
    *,
    on_progress: OnProgress | None = None,
    stopwatch: Callable[[], float] | None = None,
) -> SimResult:
    """Run a workload to its end, or to the end of the window. Deterministic.

    `stopwatch` (such as time.perf_counter) is read around every decision, for `ReplicaUse.scheduling_s`; it changes
    nothing else.
    """
    return _EventLoop(instance, sorted(workload, key=lambda r: r.arrival_s), run, on_progress, stopwatch).run()


class _EventLoop:
    """One run."""

    def __init__(
        self,
        instance: InstanceSpec,
        workload: Sequence[TraceRequest],
        spec: RunSpec,
        on_progress: OnProgress | None,
        stopwatch: Callable[[], float] | None,
    ) -> None:
        self.instance, self.spec, self.on_progress = instance, spec, on_progress
        self.rows: list[IterationRecord] | None = [] if spec.keep_iterations else None
        self.replicas = [
            SimulatedEngine(
                index,
                instance,
                NoiseSource(spec.noise, f"noise {spec.seed} {index}"),
                spec.fast_forward,
                self.rows,
                stopwatch,
            )
            for index in range(spec.replicas)
        ]
        self.end_s = spec.window_s if spec.window_s is not None else NEVER
        self.arrivals = [request for request in workload if request.arrival_s < self.end_s]
        self.tracks: list[DecodeTrack] = []
        self.inside: list[tuple[float, int, int, int]] = []  # (time, priority, batch, replica)
        self.outside: list[tuple[float, int]] = []  # (time, arrival number) of clients that leave
        self.last_s = 0.0
        self._patience = random.Random(f"patience {spec.seed}")

    def run(self) -> SimResult:
        arrivals, inside, outside, replicas = self.arrivals, self.inside, self.outside, self.replicas
        following, count, beats = 0, len(self.arrivals), 0
        touched: set[int] = set()
        while True:
            arrival_s = arrivals[following].arrival_s if following < count else NEVER
            now = min(inside[0][0] if inside else NEVER, arrival_s, outside[0][0] if outside else NEVER)
            if now == NEVER or now > self.end_s:
                break
            while inside and inside[0][0] == now:
                _, priority, batch, index = heapq.heappop(inside)
                if priority == COMPLETE:
                    replicas[index].complete(batch, now)
                touched.add(index)
            while outside and outside[0][0] == now:
                self._leave(heapq.heappop(outside)[1], now, touched)
            while arrival_s == now:
                self._arrive(arrivals[following], now, touched)
                following += 1
                arrival_s = arrivals[following].arrival_s if following < count else NEVER
            quiet_s = min(arrival_s, outside[0][0] if outside else NEVER, self.end_s)
            for index in sorted(touched) if len(touched) > 1 else touched:
                for at_s, batch in replicas[index].pump(now, quiet_s):
                    heapq.heappush(inside, (at_s, COMPLETE if batch >= 0 else STAGE_FREE, batch, index))
            touched.clear()
            self.last_s = now
            beats += 1
            if self.on_progress is not None and not beats & 0x3FF:
                self.on_progress(now, sum(track.ended_s is not None for track in self.tracks))
        return self._result()

    # -- what comes from outside ------------------------------------------------------------------------------------

    def _arrive(self, source: TraceRequest, now: float, touched: set[int]) -> None:
        number = len(self.tracks)
        spec = self.spec
        targets = spec.targets.get(source.klass, NO_TARGETS)
        request = Request(
            id=f"r{number}",
            arrival_s=source.arrival_s,
            prompt_tokens=max(1, source.prompt_tokens),
            max_output_tokens=max(1, source.output_tokens, spec.max_output or 0),
            cached_tokens=max(0, min(source.cached_tokens, source.prompt_tokens - 1)),
            slo=Slo(ttft_s=targets.ttft_s, tbt_s=targets.tbt_s) if spec.told else Slo(),
        )
        track = DecodeTrack(request, source)
        self.tracks.append(track)
        replica = self.replicas[0]
        if len(self.replicas) > 1:
            replica = min(self.replicas, key=lambda r: (len(r.tracks), r.index))
        try:
            replica.add(track, now)
        except RequestError as error:
            track.ended_s, track.error = now, f"rejected: {error}"
            return
        touched.add(replica.index)
        waits = [] if spec.timeout_s is None else [spec.timeout_s]
        if spec.patience_s is not None:
            waits.append(self._patience.expovariate(1.0 / spec.patience_s))
        if waits:
            heapq.heappush(self.outside, (now + min(waits), number))

    def _leave(self, number: int, now: float, touched: set[int]) -> None:
        track = self.tracks[number]
        if track.ended_s is not None:
            return
        by_timeout = self.spec.timeout_s is not None and now - track.request.arrival_s >= self.spec.timeout_s
        self.replicas[track.replica].abort(track, now, "timeout" if by_timeout else "aborted")
        touched.add(track.replica)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _result(self) -> SimResult:
        end_s = self.spec.window_s if self.spec.window_s is not None else self.last_s
        first_s = 0.0 if self.spec.window_s is not None else (self.arrivals[0].arrival_s if self.arrivals else 0.0)
        return SimResult(
            records=tuple(self._record(track) for track in self.tracks),
            replicas=tuple(replica.use(end_s) for replica in self.replicas),
            duration_s=end_s - first_s,
            iterations=tuple(self.rows or ()),
            yardstick=self.instance.yardstick,
            stages=self.instance.config.stages,
            groups=self.instance.config.kv_parallel,
        )

    def _record(self, track: DecodeTrack) -> RequestRecord:
        if track.ended_s is None:
            track.settle()
        targets = self.spec.targets.get(track.source.klass, NO_TARGETS)
        if self.spec.deadline_is_target and targets.ttft_s is None and track.deadline_s is not None:
            ttft_s = track.deadline_s - track.request.arrival_s
            targets = SloTargets(ttft_s, targets.tbt_s, targets.tpot_s, targets.e2e_s)
        return record_of(track, targets)
