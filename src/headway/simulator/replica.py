"""One simulated instance: the engine's loop around its own scheduler, with a pipeline of predicted times for a machine.

The contract with the scheduler is the live engine's: at most `stages` batches in flight, the next one made when stage 0
frees, `complete` when a batch leaves the last stage. Whatever `schedule` decides is carried out as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from headway.core.batch import Batch, Chunk, Progress
from headway.core.events import Event
from headway.core.span import Span
from headway.kv.ledger import Ledger
from headway.latency.base import LatencyModel, Load, load_s, one_chunk_s
from headway.latency.corrected import CorrectedLatency
from headway.scheduling.scheduler import Scheduler
from headway.simulator.cohorts import Cohort, Cohorts, Track
from headway.simulator.noise import NoiseSource
from headway.simulator.pipeline import Pipeline
from headway.simulator.result import Iteration, ReplicaUse
from headway.simulator.spec import InstanceSpec

AHEAD = 1 << 20


class Carried:
    """A batch between its start and its end: the time of its last step, and what it began with."""

    __slots__ = ("batch", "cohort", "elapsed_s", "end_s", "repeats")

    def __init__(self, batch: Batch, cohort: Cohort, end_s: float, elapsed_s: float, repeats: int) -> None:
        self.batch, self.cohort, self.end_s = batch, cohort, end_s
        self.elapsed_s, self.repeats = elapsed_s, repeats


class Replica:
    """Calls are made in order of time. `pump` starts batches and gives the events to come back at."""

    def __init__(
        self,
        index: int,
        spec: InstanceSpec,
        noise: NoiseSource,
        fast_forward: bool,
        iterations: list[Iteration] | None,
        stopwatch: Callable[[], float] | None = None,
    ) -> None:
        self.index = index
        self.spec = spec
        self.tracks: dict[str, Track] = {}
        self.latency: LatencyModel = CorrectedLatency(spec.latency) if spec.learns else spec.latency
        self.ledger = Ledger(spec.kv_tokens, spec.block_tokens)
        self.scheduler = Scheduler(spec.config, self.latency, self.ledger)
        self.pipeline = Pipeline(spec.config.stages, spec.link)
        self._cohorts = Cohorts(self.tracks)
        self._runs: dict[int, Carried] = {}
        self._noise = noise
        self._truth = spec.truth
        self._exact = noise.exact and spec.truth is None
        self._ahead = AHEAD if fast_forward and not spec.learns else 1
        self._rows = iterations
        self._stopwatch = stopwatch
        self._batches = self._iterations = self._prefill = self._decoded = self._kv_read = 0
        self._preemptions = self._recomputed = self._kv_peak = 0
        self._pairs = self._busy_s = self._scheduling_s = 0.0

    # -- what may happen to it ------------------------------------------------------------------------------------

    def add(self, track: Track, now: float) -> None:
        """Raises RequestError when the request could never be served."""
        name = track.request.id
        self.scheduler.add(Span.whole(track.request), now)
        self.tracks[name] = track
        track.replica = self.index
        track.deadline_s = self.scheduler.deadline_s(name)

    def abort(self, track: Track, now: float, error: str) -> None:
        """The client has left; the scheduler drops the request at once or when its batch is done."""
        self._cohorts.leave(track)
        self._end(track, now, error)
        self._hear(self.scheduler.abort(track.request.id, now))

    def lose(self, now: float) -> None:
        """The instance has lost its KV and what it was computing."""
        for run in self._runs.values():
            if run.repeats > 1:  # all but the last had been carried out
                self._hear(self.scheduler.complete(run.batch.id, [], now, None, run.repeats - 1))
        self._runs.clear()
        self.pipeline.reset(now)
        self._hear(self.scheduler.lost(0, now))

    def pump(self, now: float, quiet_s: float) -> list[tuple[float, int]]:
        """Start batches while stage 0 is free. (time, batch or -1) at which to come back: batch is to be completed, -1:
        stage 0 is free. Until `quiet_s` nothing will happen that this replica has not said itself."""
        begun: list[tuple[float, int]] = []
        while self.pipeline.free_s <= now:
            if self._stopwatch is None:
                batch = self.scheduler.schedule(now, self._ahead)
            else:
                started = self._stopwatch()
                batch = self.scheduler.schedule(now, self._ahead)
                self._scheduling_s += self._stopwatch() - started
            if batch is None:
                break
            run = self._start(batch, now, quiet_s)
            self._runs[batch.id] = run
            begun.append((run.end_s, batch.id))
            if self.pipeline.free_s < run.end_s:
                begun.append((self.pipeline.free_s, -1))
        return begun

    def complete(self, batch_id: int, now: float) -> None:
        """The batch has left the last stage. Ids of lost batches are ignored."""
        run = self._runs.pop(batch_id, None)
        if run is None:
            return
        batch, cohort = run.batch, run.cohort
        part = batch.parts[0]
        results: list[Progress] = []
        ended: list[Track] = []
        if part.decodes.members:
            cohort.times.append(now)
            for name in self._cohorts.finished(cohort):
                results.append(Progress(name, 1, True))
                ended.append(self.tracks[name])
        for chunk in part.prefills:
            if chunk.last:
                self._first(chunk, now, results, ended)
        elapsed_s = run.elapsed_s if self.spec.learns else None
        self._hear(self.scheduler.complete(batch.id, results, now, elapsed_s, run.repeats))
        for track in ended:
            self._end(track, now, None)

    def prompts_done(self, batch_id: int) -> list[str]:
        """Requests whose prompt a batch in flight completes; none when it is not in flight."""
        run = self._runs.get(batch_id)
        return [chunk.request for chunk in run.batch.parts[0].prefills if chunk.last] if run is not None else []

    def flying(self, batch_id: int) -> bool:
        """Whether a batch is in flight."""
        return batch_id in self._runs

    def cut(self, now: float) -> tuple[float, int] | None:
        """Somebody comes in the middle of repeated decodes: they end with the step that is under way. (time, batch) at
        which to come back instead, or None when nothing is to be cut. For one stage, without kept iterations."""
        for run in self._runs.values():
            times, first = run.cohort.times, len(run.cohort.times) - (run.repeats - 1)
            done = bisect_right(times, now, first)
            if done >= len(times):
                continue
            end_s, gone, count = times[done], len(times) - done, len(run.batch.parts[0].decodes.members)
            del times[done:]
            before, after = run.repeats, run.repeats - gone
            read = gone * run.batch.parts[0].decodes.kv_sum + count * (before * (before - 1) - after * (after - 1)) // 2
            self._busy_s -= run.end_s - end_s
            self._iterations -= gone
            self._decoded -= gone * count
            self._kv_read -= read
            self._pairs -= read
            run.end_s, run.repeats = end_s, after
            self.pipeline.cut(end_s)
            return end_s, run.batch.id
        return None

    # -- carrying out -----------------------------------------------------------------------------------------------

    def _start(self, batch: Batch, now: float, quiet_s: float) -> Carried:
        part = batch.parts[0]
        group = part.decodes
        cohort = self._cohorts.of(group)
        for chunk in part.prefills:
            track = self.tracks[chunk.request]
            if track.scheduled_s is None:
                track.scheduled_s = now
            self._prefill += chunk.tokens
            self._kv_read += chunk.start + chunk.tokens
            self._pairs += chunk.tokens * (chunk.start + 0.5 * (chunk.tokens + 1))
        stage_s = self._stage_s(batch)
        rows = batch.tokens if self.spec.config.stages > 1 else 0
        spans = self.pipeline.enter(now, stage_s, rows)
        end_s, repeats = spans[-1][1], 1
        self._busy_s += stage_s
        if batch.repeat > 1:
            end_s, repeats = self._repeat(batch, cohort, end_s, quiet_s)
        if self._rows is not None:
            chunks = tuple((chunk.request, chunk.start, chunk.tokens) for chunk in part.prefills)
            row = Iteration(
                self.index, batch.id, tuple(spans), end_s, group.count, group.kv_sum, chunks, batch.predicted_s, repeats
            )
            self._rows.append(row)
        count = len(group.members)
        self._batches += 1
        self._iterations += repeats
        self._decoded += repeats * count
        read = repeats * group.kv_sum + count * (repeats * (repeats - 1) // 2)
        self._kv_read += read
        self._pairs += read
        self._kv_peak = max(self._kv_peak, self.ledger.used_tokens)
        return Carried(batch, cohort, end_s, stage_s, repeats)

    def _repeat(self, batch: Batch, cohort: Cohort, end_s: float, quiet_s: float) -> tuple[float, int]:
        """Go on with the same decodes while nothing can interfere: (end, iterations).

        With one stage whatever comes during a step waits for its end, so a step may be the last that begins in the
        quiet; with several it could enter stage 0 behind it, so the last must end in the quiet.
        """
        group = batch.parts[0].decodes
        count, kv_sum = len(group.members), group.kv_sum
        most = min(batch.repeat, self._cohorts.steps_left(cohort))
        single = self.spec.config.stages == 1
        repeats, times = 1, cohort.times
        model, noise = self._truth or self.latency, self._noise
        while repeats < most and end_s < quiet_s:
            kv_sum += count
            factor = noise.factor()
            stage_s = load_s(model, Load(count, count, kv_sum)) * factor
            if not single and self.pipeline.end_s(end_s, stage_s, count) > quiet_s:
                noise.keep(factor)
                break
            times.append(end_s)
            end_s = self.pipeline.enter(end_s, stage_s, count)[-1][1]
            self._busy_s += stage_s
            repeats += 1
        return end_s, repeats

    def _stage_s(self, batch: Batch) -> float:
        if self._exact:
            return batch.predicted_s
        if self._truth is None and not self.spec.learns:
            return batch.predicted_s * self._noise.factor()
        model = self._truth or self.spec.latency
        part = batch.parts[0]
        load = Load(part.decodes.count, part.decodes.count, part.decodes.kv_sum)
        for chunk in part.prefills:
            load = load.with_chunk(chunk.tokens, one_chunk_s(model, chunk.start, chunk.tokens), chunk.start)
        return load_s(model, load) * self._noise.factor()

    def _first(self, chunk: Chunk, now: float, results: list[Progress], ended: list[Track]) -> None:
        """A prompt is complete, or complete again: its next token is there."""
        track = self.tracks.get(chunk.request)
        if track is None or track.ended_s is not None:
            return
        self._cohorts.leave(track)  # where it decoded before it was preempted
        track.times.append(now)
        track.left -= 1
        if track.left <= 0:
            results.append(Progress(chunk.request, 1, True))
            ended.append(track)

    def _end(self, track: Track, now: float, error: str | None) -> None:
        track.ended_s, track.error = now, error

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            if event.kind == "preempted":
                self._preemptions += 1
                self._recomputed += event.tokens
            elif event.kind != "started":
                del self.tracks[event.request]

    def use(self, until_s: float) -> ReplicaUse:
        """What was done, up to `until_s`."""
        over_s = max(0.0, self.pipeline.free_s - until_s)
        return ReplicaUse(
            iterations=self._iterations,
            batches=self._batches,
            busy_s=max(0.0, self._busy_s - over_s),
            prefill_tokens=self._prefill,
            decode_tokens=self._decoded,
            kv_read_tokens=self._kv_read,
            attention_pairs=self._pairs,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed,
            kv_peak_tokens=self._kv_peak,
            scheduling_s=self._scheduling_s,
        )
