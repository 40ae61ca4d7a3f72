"""One simulated engine: the live engine's loop around the real scheduler, with predicted stage times.

The contract with the scheduler is the live engine's: at most `stages` batches in flight, the next one scheduled when
stage 0 becomes free, `complete` when a batch leaves the last stage. Batches are executed exactly as scheduled. Each KV
group has its own pipeline; a batch of several groups enters their pipelines in lockstep, at the slowest group's pace.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict

from headway.core.batch import Batch, Chunk, DecodeGroup, GroupBatch, KvOp, RequestProgress
from headway.core.errors import ConfigError, PredictedLateError, RequestError
from headway.core.logs import EventSink, arrival_fields, batch_fields
from headway.core.request import Request, RequestEvent, Span
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s
from headway.perf.latency.corrected import CorrectedLatency, describe
from headway.perf.latency.groups import batch_loads, parts_s
from headway.policy.iteration.groups import make_scheduler
from headway.policy.iteration.scheduler import InstanceScheduler, refuse_late
from headway.sim.prefix_cache import PrefixCacheUse, make_block_manager, prefixes_of
from headway.sim.result import GroupJoin, IterationRecord, ReplicaUse
from headway.sim.spec import InstanceSpec, NoiseSource, StagePipeline
from headway.sim.workload import TraceRequest


class RunningBatch:
    """A batch in flight, standing for one iteration or for several with the same decodes."""

    __slots__ = ("batch", "cohorts", "elapsed_s", "end_s", "repeats")

    def __init__(self, batch: Batch, cohorts: list[DecodeCohort], end_s: float, elapsed_s: float, repeats: int) -> None:
        self.batch = batch
        self.cohorts = cohorts
        """The decode cohort of each part of the batch."""
        self.end_s = end_s
        """Virtual seconds at which the last iteration leaves the last stage."""
        self.elapsed_s = elapsed_s
        """Seconds of the first iteration on one stage, reported to schedulers that correct their predictions."""
        self.repeats = repeats
        """Iterations of the same decodes that the batch stands for."""


class ReplicaCounters:
    """What `ReplicaUse` reports, counted when batches begin."""

    __slots__ = (
        "batches", "busy_s", "decoded", "iterations", "joins", "kv_peak", "kv_read", "more_passes", "pairs",
        "preemptions", "prefill", "recomputed", "scheduling_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.batches = self.iterations = self.prefill = self.decoded = self.kv_read = 0
        self.preemptions = self.recomputed = self.kv_peak = self.more_passes = 0
        self.joins: list[GroupJoin] = []
        self.pairs = self.busy_s = self.scheduling_s = 0.0

    def chunk(self, start: int, tokens: int) -> None:
        """Count a chunk's tokens and attention. start: tokens before it."""
        self.prefill += tokens
        self.kv_read += start + tokens
        # token i of the chunk attends to start + i + 1 tokens; the sum over the chunk
        self.pairs += tokens * (start + 0.5 * (tokens + 1))

    def decodes(self, batch: Batch, repeats: int) -> None:
        """Count the decodes of a batch; each repetition reads one more KV token for every one."""
        for part in batch.parts:
            count = len(part.decodes.members)
            self.decoded += repeats * count
            read = repeats * part.decodes.kv_sum + count * (repeats * (repeats - 1) // 2)
            self.kv_read += read
            self.pairs += read

    def join(self, now: float, replica: int, group: int, op: KvOp) -> None:
        """Count a group that joins a request with a shard, which `op` reserves."""
        # the first shard, from token 0, is no join: hence + 2
        earlier = {join.start for join in self.joins if join.request == op.request and join.start < op.start}
        self.joins.append(GroupJoin(now, replica, op.request, group, op.start, len(earlier) + 2))

    def remote_attention(self, batch: Batch, repeats: int) -> None:
        """Count KV read for decodes of other groups, and their forward passes; chunks are counted with all of it."""
        self.more_passes += repeats * (sum(part.tokens > 0 for part in batch.parts) - 1)
        chunked = {chunk.request for part in batch.parts for chunk in part.prefills}
        read = sum(a.tokens for part in batch.parts for a in part.assists if a.request not in chunked)
        self.kv_read += repeats * read
        self.pairs += repeats * read

    def use(self, over_s: float, prefix_cache: PrefixCacheUse | None = None) -> ReplicaUse:
        """Return the counters; `over_s`: seconds counted as busy that lie beyond the run."""
        return ReplicaUse(
            iterations=self.iterations,
            batches=self.batches,
            busy_s=max(0.0, self.busy_s - over_s),
            prefill_tokens=self.prefill,
            decode_tokens=self.decoded,
            kv_read_tokens=self.kv_read,
            attention_pairs=self.pairs,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed,
            kv_peak_tokens=self.kv_peak,
            scheduling_s=self.scheduling_s,
            more_passes=self.more_passes,
            joins=tuple(self.joins),
            prefix_cache=prefix_cache,
        )


class SimulatedEngineLog:
    """Writes the events of one engine of one stage, without repeated iterations. Times are virtual seconds."""

    def __init__(self, write: EventSink, spec: InstanceSpec, scheduler: InstanceScheduler) -> None:
        """Raises ConfigError where the log could not be replayed: several stages, or a model that is no table."""
        latency = describe(scheduler.latency)
        if spec.config.stages > 1 or latency is None:
            what = "several pipeline stages" if spec.config.stages > 1 else "a latency model that is no table"
            raise ConfigError(f"an event log of a simulation with {what} cannot be written: its replay would differ")
        self._write = write
        self._began: dict[int, float] = {}
        exchange = {"exchange": tuple(spec.exchange)} if spec.config.kv_parallel > 1 else {}
        write(
            "start",
            {
                "config": asdict(spec.config),
                "kv_tokens": spec.kv_tokens,
                "block_tokens": spec.block_tokens,
                "latency": latency,
                **exchange,
            },
        )

    def added(self, request: Request, now: float) -> None:
        """Write that a request has come."""
        self._write("add", {**arrival_fields(request, now), "cached": request.cached_tokens})

    def refused(self, request: Request, now: float, predicted_s: float) -> None:
        """Write that a request was refused, since its first token was predicted to come after so many seconds."""
        fields = {"cached": request.cached_tokens, "predicted_s": predicted_s}
        self._write("refuse", {**arrival_fields(request, now), **fields})

    def aborted(self, request_id: str, now: float) -> None:
        """Write that a request has left before its end."""
        self._write("abort", {"request": request_id, "at_s": now})

    def lost(self, now: float) -> None:
        """Write that all KV is lost."""
        self._began.clear()
        self._write("lost", {"at_s": now})

    def scheduled(self, batch: Batch, now: float, free: Sequence[int], groups: int) -> None:
        """Write that a batch has begun."""
        self._began[batch.id] = now
        some = {"free": list(free)} if len(free) < groups else {}
        self._write("schedule", {"id": batch.id, "at_s": now, **some})

    def completed(self, batch: Batch, elapsed_s: float, ended: Sequence[RequestProgress], now: float) -> None:
        """Write that a batch has ended."""
        stages = [(self._began.pop(batch.id), now)]
        self._write("batch", batch_fields(batch, elapsed_s, [stages] * len(batch.parts), ended, now))


MAX_REPEATS = 1 << 20
"""Most decode-only iterations simulated as one batch (fast-forward)."""


class SimulatedEngine:
    """The simulated engine of one instance. Calls must come in order of virtual time."""

    def __init__(
        self,
        index: int,
        spec: InstanceSpec,
        noise: NoiseSource,
        fast_forward: bool,
        iterations: list[IterationRecord] | None,
        stopwatch: Callable[[], float] | None = None,
        log: EventSink | None = None,
    ) -> None:
        self.index = index
        self.spec = spec
        self.tracks: dict[str, DecodeTrack] = {}
        self.latency: LatencyModel = CorrectedLatency(spec.latency) if spec.learns else spec.latency
        groups = range(spec.config.kv_parallel)
        self.block_managers = [
            make_block_manager(spec.kv_tokens, spec.block_tokens, spec.prefix_cache, self.latency) for _ in groups
        ]
        self.block_manager = self.block_managers[0]
        self.prefixes = prefixes_of(self.block_managers, logged=log is not None)
        self.scheduler = make_scheduler(spec.config, self.latency, self.block_managers, spec.exchange)
        self.pipelines = [StagePipeline(spec.config.stages, spec.link) for _ in groups]
        self.pipeline = self.pipelines[0]
        self._cohorts = DecodeCohorts(self.tracks)
        self._in_flight: dict[int, RunningBatch] = {}
        self._noises = [noise, *(noise.fork(f"group {group}") for group in groups[1:])]
        self._actual_latency = spec.actual_latency
        # without noise or another truth an iteration takes what the scheduler predicted: no second evaluation
        self._exact = noise.exact and spec.actual_latency is None
        # a model that learns is updated after every iteration, so iterations cannot be merged
        self._max_repeats = MAX_REPEATS if fast_forward and not spec.learns else 1
        self._iteration_rows = iterations
        self._stopwatch = stopwatch
        self._log = None if log is None else SimulatedEngineLog(log, spec, self.scheduler)
        self._counts = ReplicaCounters()
        # seconds that another engine's decodes add to the next batch; end of its batch that takes this one's along
        self.fused_s = self.fused_until_s = 0.0

    # -- events ---------------------------------------------------------------------------------------------------

    def add(self, track: DecodeTrack, now: float) -> None:
        """Admit a request. Raises RequestError when its KV can never fit, PredictedLateError if it asked for that."""
        name = track.request.id
        if self.prefixes is not None:
            track.request = self.prefixes.admit(track.request, track.source)
        try:
            refuse_late(self.scheduler, track.request, now)
            self.scheduler.add(Span.whole(track.request), now)
        except (RequestError, PredictedLateError) as error:
            if self.prefixes is not None:
                self.prefixes.forget(name)
            if self._log is not None and isinstance(error, PredictedLateError):
                self._log.refused(track.request, now, error.predicted_s)
            raise
        if self._log is not None:
            self._log.added(track.request, now)
        self.tracks[name] = track
        track.replica = self.index
        track.deadline_s = self.scheduler.deadline_s(name)

    def abort(self, track: DecodeTrack, now: float, error: str) -> None:
        """Abort a request; the scheduler drops it at once, or after its batch in flight completes."""
        # leave first: the token times up to now are copied from the cohort into the track
        self._cohorts.leave(track)
        track.ended_s, track.error = now, error
        if self._log is not None:
            self._log.aborted(track.request.id, now)
        self._apply_events(self.scheduler.abort(track.request.id, now))

    def lose(self, now: float) -> None:
        """Discard all KV and the batches in flight; requests stay queued and are computed again."""
        for run in self._in_flight.values():
            # `_repeat` has recorded the ends of all iterations but the last; keep those that ended before the loss
            done = run.repeats - 1
            for cohort, part in zip(run.cohorts, run.batch.parts, strict=True):
                first = len(cohort.times) - (run.repeats - 1)
                if done and part.decodes.members and first >= 0:
                    done = bisect_right(cohort.times, now, first) - first
                    del cohort.times[first + done :]
            if done:
                self._apply_events(self.scheduler.complete(run.batch.id, [], now, None, done))
        self._in_flight.clear()
        if self._log is not None:
            self._log.lost(now)
        for pipeline in self.pipelines:
            pipeline.reset(now)
        self._apply_events(self.scheduler.lost(0, now))

    def start_batches(self, now: float, quiet_s: float) -> list[tuple[float, int]]:
        """Start batches while stage 0 is free. Return events to schedule: (time, batch id) at which to call `complete`,
        or (time, -1) at which stage 0 becomes free and this is to be called again.

        Until `quiet_s` no request arrives or leaves, so decode iterations may be repeated up to then.
        """
        begun: list[tuple[float, int]] = []
        while free := self._free(now):
            if self._stopwatch is None:
                batch = self.scheduler.schedule(now, self._max_repeats, free)
            else:
                started = self._stopwatch()
                batch = self.scheduler.schedule(now, self._max_repeats, free)
                self._counts.scheduling_s += self._stopwatch() - started
            if batch is None:
                break
            if self._log is not None:
                self._log.scheduled(batch, now, free, len(self.pipelines))
            run = self._start(batch, now, quiet_s)
            self._in_flight[batch.id] = run
            begun.append((run.end_s, batch.id))
            free_s = self.pipelines[batch.parts[0].group].free_s
            # several stages: the next batch can enter stage 0 before this one leaves the last
            if free_s < run.end_s:
                begun.append((free_s, -1))
            # mostly there is no other group, and stage 0 is busy now
            elif len(self.pipelines) == 1 and free_s > now:
                break
        return begun

    def _free(self, now: float) -> Sequence[int]:
        """Return the KV groups whose stage 0 is free."""
        if len(self.pipelines) == 1:
            return (0,) if self.pipeline.free_s <= now else ()
        return [group for group, pipeline in enumerate(self.pipelines) if pipeline.free_s <= now]

    def complete(self, batch_id: int, now: float) -> list[DecodeTrack]:
        """Complete a batch that has left the last stage; ignore one that was lost. Return the tracks that ended."""
        run = self._in_flight.pop(batch_id, None)
        if run is None:
            return []
        batch = run.batch
        results: list[RequestProgress] = []
        ended: list[DecodeTrack] = []
        for part, cohort in zip(batch.parts, run.cohorts, strict=True):
            if part.decodes.members:
                cohort.times.append(now)
                # only members with their last token are visited, not the whole group
                for name in self._cohorts.finished(cohort):
                    results.append(RequestProgress(name, 1, True))
                    ended.append(self.tracks[name])
            for chunk in part.prefills:
                if chunk.last:
                    self._complete_prompt(chunk, now, results, ended)
        if self._log is not None:
            self._log.completed(batch, run.elapsed_s, results, now)
        elapsed_s = run.elapsed_s if self.spec.learns else None
        self._apply_events(self.scheduler.complete(batch.id, results, now, elapsed_s, run.repeats))
        for track in ended:
            track.ended_s = now
        return ended

    def prompt_progress(self, batch_id: int) -> list[tuple[str, int, bool]]:
        """Return (request, prompt tokens computed by its end, whether the prompt is then complete) for each chunk; none
        when the batch is not in flight."""
        run = self._in_flight.get(batch_id)
        parts = run.batch.parts if run is not None else ()
        return [(chunk.request, chunk.start + chunk.tokens, chunk.last) for part in parts for chunk in part.prefills]

    def __contains__(self, request: str) -> bool:
        return request in self.scheduler

    @property
    def used_tokens(self) -> int:
        """Tokens of the KV blocks in use, over all KV groups."""
        return sum(manager.used_tokens for manager in self.block_managers)

    def busy_until_s(self) -> float:
        """Return the virtual time at which the last batch in flight ends; 0.0: there is none."""
        return max((run.end_s for run in self._in_flight.values()), default=0.0)

    def is_in_flight(self, batch_id: int) -> bool:
        """Return whether a batch is in flight."""
        return batch_id in self._in_flight

    def end_repeats(self, now: float) -> tuple[float, int] | None:
        """End repeated decodes with the iteration in progress, because a request is about to arrive or leave.

        Return the (time, batch) at which to complete it instead; None: none are repeated. Only for engines of one stage
        that keep no iterations.
        """
        for run in self._in_flight.values():
            times = run.cohorts[0].times
            first = len(times) - (run.repeats - 1)
            if first < 0:
                continue  # every member has left the cohort, which has dropped the times
            # `times[done]` is the end of the iteration in progress; without it the last iteration is in progress
            done = bisect_right(times, now, first)
            if done >= len(times):
                continue
            end_s, gone, count = times[done], len(times) - done, len(run.batch.parts[0].decodes.members)
            del times[done:]
            before, after = run.repeats, run.repeats - gone
            # iteration j reads kv_sum + j · count KV tokens: take back those of j in [after, before)
            read = gone * run.batch.parts[0].decodes.kv_sum + count * (before * (before - 1) - after * (after - 1)) // 2
            self._counts.busy_s -= run.end_s - end_s
            self._counts.iterations -= gone
            self._counts.decoded -= gone * count
            self._counts.kv_read -= read
            self._counts.pairs -= read
            run.end_s, run.repeats = end_s, after
            self.pipeline.cut(end_s)
            return end_s, run.batch.id
        return None

    # -- carrying out -----------------------------------------------------------------------------------------------

    def _start(self, batch: Batch, now: float, quiet_s: float) -> RunningBatch:
        parts = batch.parts
        cohorts = []
        for part in parts:
            cohorts.append(self._cohorts.of(part.decodes, part.group))
            if part.kv_ops or part.prefills:
                self._count_chunks(part, now)
        woken_s = self.spec.serving.idle_s if self.pipeline.free_s < now else 0.0
        stage_s = max(self._stage_s(batch) + woken_s + self.fused_s, self.fused_until_s - now)
        spans = self._enter(batch, now, stage_s)
        end_s, repeats = spans[-1][1], 1
        # a batch on n of the instance's g KV groups keeps n / g of it busy
        self._counts.busy_s += stage_s * len(parts) / len(self.pipelines)
        if batch.repeat > 1:
            end_s, repeats = self._repeat(batch, cohorts, end_s, quiet_s)
        if self._iteration_rows is not None:
            self._iteration_rows.append(IterationRecord.of(self.index, batch, spans, end_s, repeats))
        self._counts.batches += 1
        self._counts.iterations += repeats
        self._counts.decodes(batch, repeats)
        if len(parts) > 1:
            self._counts.remote_attention(batch, repeats)
        return RunningBatch(batch, cohorts, end_s, stage_s, repeats)

    def _count_chunks(self, part: GroupBatch, now: float) -> None:
        for chunk in part.prefills:
            track = self.tracks[chunk.request]
            if track.scheduled_s is None:
                track.scheduled_s = now
                if self.prefixes is not None:
                    track.cached_tokens = self.prefixes.taken(track.request)
            self._counts.chunk(chunk.start, chunk.tokens)
        for op in part.kv_ops:
            if op.start and op.request in self.tracks:
                self._counts.join(now, self.index, part.group, op)
        if part.kv_ops:
            self._counts.kv_peak = max(self._counts.kv_peak, self.used_tokens)

    def _enter(self, batch: Batch, at_s: float, stage_s: float) -> list[tuple[float, float]]:
        parts = batch.parts
        # activations cross a link only between stages
        rows = max(part.tokens for part in parts) if self.spec.config.stages > 1 else 0
        first = self.pipelines[parts[0].group]
        if len(parts) == 1:
            return first.enter(at_s, stage_s, rows)
        return first.lockstep([self.pipelines[part.group] for part in parts[1:]], at_s, stage_s, rows)

    def _repeat(self, batch: Batch, cohorts: list[DecodeCohort], end_s: float, quiet_s: float) -> tuple[float, int]:
        """Repeat a batch of decodes while no request can interfere. Return its end and the number of iterations.

        With one stage an arrival during an iteration waits for its end, so the last iteration need only begin before
        `quiet_s`. With several stages the arrival could enter stage 0 behind it, so the last one must end before
        `quiet_s`.
        """
        most = min(batch.repeat, *(self._cohorts.steps_left(cohort) for cohort in cohorts))
        single = self.spec.config.stages == 1
        if single and self._exact and len(self.pipelines) == 1 and not self.latency.coupled:
            end_s, self._counts.busy_s, repeats = repeat_decodes(
                self.latency, batch.parts[0].decodes, cohorts[0].times, (end_s, quiet_s), most, self._counts.busy_s
            )
            self.pipeline.cut(end_s)
            return end_s, repeats
        model, noise = self._actual_latency or self.latency, self._noises[batch.parts[0].group]
        loads = batch_loads(model, batch.parts, self.spec.exchange)
        counts = [len(part.decodes.members) for part in batch.parts]
        rows, repeats = max(counts), 1
        decoding = [cohort.times for cohort, count in zip(cohorts, counts, strict=True) if count]
        while repeats < most and end_s < quiet_s:
            # one more KV token for each decode than in the iteration before
            loads = [
                BatchLoad(load.tokens, load.decodes, load.decode_kv + count, load.chunk_s, load.chunk_past)
                for load, count in zip(loads, counts, strict=True)
            ]
            predicted_s = max(load_s(model, load) for load in loads)
            factor = noise.factor(predicted_s)
            stage_s = predicted_s * factor
            if not single and self.pipeline.end_s(end_s, stage_s, rows) > quiet_s:
                # not started: the factor goes to the next iteration, as without fast-forward
                noise.keep(factor)
                break
            # the end of the iteration before this one; `complete` appends the last one's
            for times in decoding:
                times.append(end_s)
            end_s = self._enter(batch, end_s, stage_s)[-1][1]
            self._counts.busy_s += stage_s * len(counts) / len(self.pipelines)
            repeats += 1
        return end_s, repeats

    def _stage_s(self, batch: Batch) -> float:
        predicted_s = batch.predicted_s
        if self._exact:
            return predicted_s
        if self._actual_latency is not None or self.spec.learns:
            predicted_s = parts_s(self._actual_latency or self.spec.latency, batch.parts, self.spec.exchange)
        return predicted_s * self._noises[batch.parts[0].group].factor(predicted_s)

    def _complete_prompt(
        self, chunk: Chunk, now: float, results: list[RequestProgress], ended: list[DecodeTrack]
    ) -> None:
        """Record the token that a prompt's last chunk gives, also after a preemption."""
        track = self.tracks.get(chunk.request)
        if track is None or track.ended_s is not None:
            return
        # a request that was preempted is still in the cohort where it decoded before
        self._cohorts.leave(track)
        track.times.append(now)
        track.left -= 1
        if track.left <= 0:
            results.append(RequestProgress(chunk.request, 1, True))
            ended.append(track)

    def _apply_events(self, events: list[RequestEvent]) -> None:
        for event in events:
            if event.kind == "preempted":
                self._counts.preemptions += 1
                self._counts.recomputed += event.tokens
            # finished or aborted
            elif event.kind != "started":
                del self.tracks[event.request]

    def use(self, until_s: float) -> ReplicaUse:
        """Return the replica's counters up to `until_s`."""
        # batches count as busy when they start; take off what lies beyond `until_s`
        over_s = sum(max(0.0, pipeline.free_s - until_s) for pipeline in self.pipelines) / len(self.pipelines)
        return self._counts.use(over_s, self.prefixes.use() if self.prefixes is not None else None)


# Times of output tokens, stored once for all requests that decode together.
#
# A cohort follows a decode group from epoch to epoch and stores the end of each step. A member stores the step at which
# it joined, so its token times are a slice of the cohort's, copied when it leaves. The cost of a step does not depend
# on the number of members; only joining, leaving and finishing do.


class DecodeTrack:
    """One request in a scheduler, with the times of its output tokens (virtual seconds)."""

    __slots__ = ("cached_tokens", "cohort", "deadline_s", "due_s", "ended_s", "error", "left", "owner", "rejected",
                 "replica", "request", "scheduled_s", "since", "source", "times")  # fmt: skip

    def __init__(self, request: Request, source: TraceRequest) -> None:
        self.request = request
        """As the scheduler sees it."""
        self.owner = request.id
        """Id of the request that it serves, which may have another one in the scheduler."""
        self.source = source
        self.left = max(1, source.output_tokens)
        """Output tokens still to come, as of step `since` of the cohort."""
        self.times: list[float] = []
        """Times of the tokens, without those that are still stored in the cohort only."""
        self.cohort: DecodeCohort | None = None
        """The cohort where the request decodes; None while it prefills or waits."""
        self.since = 0
        """First step of the cohort that gave this request a token."""
        self.replica = -1
        """Index of the replica that serves the request; -1 before it is routed."""
        self.scheduled_s: float | None = None
        self.deadline_s: float | None = None
        """First-token deadline that the scheduler assigned, if its policy has any."""
        self.ended_s: float | None = None
        self.error: str | None = None
        self.rejected = False
        self.cached_tokens = request.cached_tokens
        """Tokens of the prompt that were cached when the request was first scheduled."""

    def settle(self) -> None:
        """Copy this request's token times from the cohort."""
        cohort = self.cohort
        if cohort is not None:
            mine = cohort.times[self.since :]
            # `since + left` is unchanged by this, so the cohort's heap entry remains valid
            self.times += mine
            self.left -= len(mine)
            self.since = len(cohort.times)


class DecodeCohort:
    """The token times of a decode group over its epochs."""

    __slots__ = ("due", "epoch", "size", "times")

    def __init__(self) -> None:
        self.times: list[float] = []
        """End of each step, virtual seconds."""
        self.due: list[tuple[int, str]] = []
        """Heap of (step, request): the step after which a member has all of its tokens. May hold stale entries."""
        self.epoch = (0, 0)
        """(KV group, epoch of the decode group)."""
        self.size = 0


class DecodeCohorts:
    """All decode cohorts of one replica, by KV group and epoch. `tracks`: the replica's requests by id."""

    def __init__(self, tracks: dict[str, DecodeTrack]) -> None:
        self._tracks = tracks
        self._by_epoch: dict[tuple[int, int], DecodeCohort] = {}

    def of(self, group: DecodeGroup, where: int = 0) -> DecodeCohort:
        """Return the cohort of a decode group about to run in KV group `where`, brought to the group's epoch."""
        epoch = (where, group.epoch)
        cohort = self._by_epoch.get(epoch)
        if cohort is not None:
            return cohort
        # a new epoch changes its base epoch by `left` and `joined`: update that cohort in place
        cohort = self._by_epoch.pop((where, group.base), None) or DecodeCohort()
        for name in group.left:
            track = self._tracks.get(name)
            # an aborted request has left its cohort already
            if track is not None and track.cohort is cohort:
                self.leave(track)
        for name in group.joined:
            track = self._tracks[name]
            self.leave(track)
            track.cohort = cohort
            track.since = len(cohort.times)
            cohort.size += 1
            heapq.heappush(cohort.due, (track.since + track.left, name))
        cohort.epoch = epoch
        self._by_epoch[epoch] = cohort
        return cohort

    def leave(self, track: DecodeTrack) -> None:
        """Remove a request from its cohort, if it has one."""
        cohort = track.cohort
        if cohort is None:
            return
        track.settle()
        track.cohort = None
        cohort.size -= 1
        # without members no slice refers to the steps: drop them (`of` may go on with the emptied cohort)
        if not cohort.size:
            cohort.times.clear()
            cohort.due.clear()
            self._by_epoch.pop(cohort.epoch, None)

    def steps_left(self, cohort: DecodeCohort) -> int:
        """Return the number of steps until the first member has all of its tokens."""
        self._drop_stale(cohort)
        # without members any number of steps is possible
        return cohort.due[0][0] - len(cohort.times) if cohort.due else 1 << 30

    def finished(self, cohort: DecodeCohort) -> list[str]:
        """Remove and return the members that have all of their tokens after the last step."""
        ended: list[str] = []
        # the heap's minimum bounds valid and stale entries alike: usually nothing is due, and nothing need be dropped
        if not cohort.due or cohort.due[0][0] > len(cohort.times):
            return ended
        while self.steps_left(cohort) <= 0:
            name = heapq.heappop(cohort.due)[1]
            self.leave(self._tracks[name])
            ended.append(name)
        return ended

    def _drop_stale(self, cohort: DecodeCohort) -> None:
        # an entry is stale when its request has left, joined another cohort, or joined this one again
        due = cohort.due
        while due:
            at, name = due[0]
            track = self._tracks.get(name)
            if track is not None and track.cohort is cohort and track.since + track.left == at:
                return
            heapq.heappop(due)


def repeat_decodes(
    latency: LatencyModel,
    decodes: DecodeGroup,
    times: list[float],
    between_s: tuple[float, float],
    most: int,
    busy_s: float,
) -> tuple[float, float, int]:
    """Repeat an iteration of the same decodes, on one stage and without noise: the simulator's innermost loop.

    between_s: (end of the first iteration, time by which the last one must begin). times: gets the end of every
    iteration but the last. Return the end of the last, `busy_s` with the further ones, and how many there are in all.
    """
    (end_s, quiet_s), count = between_s, len(decodes.members)
    kv_sum, repeats = decodes.kv_sum, 1
    rows_s, decode_s = latency.rows_s(count), latency.decode_steps(count)
    while repeats < most and end_s < quiet_s:
        # one more KV token for each decode than in the iteration before
        kv_sum += count
        stage_s = rows_s + decode_s(kv_sum)
        times.append(end_s)
        end_s += stage_s
        busy_s += stage_s
        repeats += 1
    return end_s, busy_s, repeats
