"""The engine's loop body (schedule, execute, update, once for each call of `step`), and samples of its iterations for
the live page.

Handles requests as ids and tokens as numbers; decides when a request has ended (end token, stop token, length,
time-out); never blocks on a client. No torch, no sockets; time comes from an injected clock.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from msgspec.structs import replace

from headway.core.batch import Batch, ClockProtocol, EmittedToken, Executor, RequestProgress, StepResult
from headway.core.errors import LostError, OverloadedError, PredictedLateError, RequestError, UnavailableError
from headway.core.logs import EventSink, LogSink, arrival_fields, batch_fields, group_fields
from headway.core.request import Request, RequestEvent, Span
from headway.perf.latency.corrected import describe
from headway.perf.utilisation import AttentionWork
from headway.policy.iteration.admission import KV_HEADROOM
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.groups import group_policies
from headway.policy.iteration.scheduler import InstanceScheduler, refuse_late
from headway.runtime.engine.config import PoisonRequestTracker, RestartLimit
from headway.runtime.engine.protocol import (
    ChunkSample,
    EngineInfo,
    EngineSamples,
    EngineStats,
    FinishReason,
    IterationSample,
    OutputDelta,
    SubmitRequest,
    WaitingSample,
)
from headway.runtime.engine.requests import PrefixLookups, ScheduledOutput, check_tokens, rejection_delta
from headway.sim.replay import limit_of_chunk

# Samples of an engine's iterations for the live page: bounded in number whatever the rate of iterations.
#
# Fed with the events of the engine's event log (`core.logs`), in place of a log or beside one.

MOST_SAMPLES = 64
"""Samples between two messages to the server (0.1 s); iterations beyond that are added to the last ones."""
MOST_WAITING = 64
MOST_CHUNKS = 8
"""Chunks of one sample; further ones are left out."""
_JOINED_S = 0.02
"""Iterations of decodes only in a row become one sample of up to this length."""
_CLOSE_S = 0.002
"""Longest time between two iterations of one sample."""


class IterationSampler:
    """Collects samples between two calls of `take`."""

    def __init__(self, scheduler: InstanceScheduler) -> None:
        self._scheduler = scheduler
        self._policies = group_policies(scheduler)
        # By batch in flight: when it was decided.
        self._decided: dict[int, float] = {}
        self._samples: list[IterationSample] = []
        # Place in `_samples` of the newest of each (group, stage).
        self._newest: dict[tuple[int, int], int] = {}

    def beside(self, log: EventSink | None) -> EventSink:
        """Return a sink for this sampler and a log, if there is one."""

        def write(kind: str, fields: dict[str, object]) -> None:
            if log is not None:
                log(kind, fields)
            self.note(kind, fields)

        return write

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take in an event of the log."""
        if kind == "schedule":
            self._decided[fields["id"]] = fields["at_s"]
        elif kind == "batch":
            self._batch(fields)
        elif kind == "lost":
            self._decided.clear()

    def take(self) -> EngineSamples:
        """Return what was collected since the last call."""
        taken = EngineSamples(tuple(self._samples), tuple(self._waiting()))
        self._samples, self._newest = [], {}
        return taken

    def _waiting(self) -> list[WaitingSample]:
        return [
            WaitingSample(state.request.id, state.deadline_s, state.work_s, state.scheduled, state.known)
            for policy in self._policies
            for state in islice(policy.queue, MOST_WAITING)
        ][:MOST_WAITING]

    def _batch(self, event: Mapping[str, Any]) -> None:
        decided_s = self._decided.pop(event["id"], event["at_s"])
        for group, decodes, chunks, stages in event["parts"]:
            rows = decodes + sum(tokens for _, _, tokens in chunks)
            policy = self._policies[group] if group < len(self._policies) else None
            sampled = tuple(_chunk(policy, rows, len(self._policies) > 1, chunk) for chunk in chunks[:MOST_CHUNKS])
            for stage, (start_s, end_s) in enumerate(stages):
                # The end as requests see it: tokens are stamped with the batch's time.
                until_s = event["at_s"] if stage == len(stages) - 1 else end_s
                self._add(
                    IterationSample(group, stage, decided_s, start_s, until_s, event["predicted_s"], decodes, sampled)
                )

    def _add(self, sample: IterationSample) -> None:
        key = (sample.group, sample.stage)
        place = self._newest.get(key)
        if place is not None:
            last = self._samples[place]
            plain = not (last.chunks or sample.chunks) and sample.start_s - last.end_s < _CLOSE_S
            if (plain and sample.end_s - last.start_s < _JOINED_S) or len(self._samples) >= MOST_SAMPLES:
                self._samples[place] = _joined(last, sample)
                return
        self._newest[key] = len(self._samples)
        self._samples.append(sample)


def _chunk(policy: IterationPolicy | None, rows: int, sharded: bool, chunk: tuple[str, int, int]) -> ChunkSample:
    """Return the sample of a chunk (request, first token, tokens), after its iteration."""
    name, start, tokens = chunk
    state = None if policy is None else policy.holders.get(name)
    # Ended or decoding by now: it was the last chunk.
    remaining = tokens if state is None or state.decoding else max(tokens, state.known - start)
    limit = "rest of the prompt"
    if policy is not None and state is not None:
        limit = limit_of_chunk(policy.config, tokens, remaining, rows, sharded)
    return ChunkSample(name, start, tokens, remaining, limit)


def _joined(first: IterationSample, second: IterationSample) -> IterationSample:
    """Return two samples as one; chunks of one request are added up."""
    chunks = {chunk.request: chunk for chunk in first.chunks}
    for chunk in second.chunks:
        before = chunks.get(chunk.request)
        chunks[chunk.request] = chunk if before is None else replace(before, tokens=before.tokens + chunk.tokens)
    return replace(
        first,
        end_s=max(first.end_s, second.end_s),
        predicted_s=first.predicted_s + second.predicted_s,
        decodes=max(first.decodes, second.decodes),
        chunks=tuple(chunks.values())[:MOST_CHUNKS],
        iterations=first.iterations + second.iterations,
    )


log = logging.getLogger("headway.engine")


class EngineCore:
    """One engine over one scheduler and one executor. Single-threaded."""

    def __init__(
        self,
        scheduler: InstanceScheduler,
        executor: Executor,
        clock: ClockProtocol,
        info: EngineInfo,
        log: EventSink | None = None,
        restarts: RestartLimit | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.info = info
        self.draining = False
        self.iteration: tuple[float, float] | None = None
        """When the iteration began that this process computes, and its predicted seconds. Heartbeats read it."""
        self.sampler: IterationSampler | None = None
        """Fed by `log`; None: no live page."""
        self.kv_incomplete: Callable[[str, int], bool] = lambda request_id, tokens: False
        """Whether KV of a request's first tokens, which a decode needs, is missing. Set by the KV transfers."""
        self.staged: list[OutputDelta] = []
        """Finished requests of phase "prefill", and decodes that stopped to continue elsewhere. The caller of `step`
        sends them after the step's deltas and empties the list."""
        self._clock = clock
        self._log = log
        self.prefixes = PrefixLookups(scheduler.block_managers[0], scheduler.latency, info.t_target_s, KV_HEADROOM)
        self._live: dict[str, ScheduledOutput] = {}
        self._timeouts: list[tuple[float, str, float]] = []
        self._batches: dict[int, tuple[Batch, float]] = {}
        self._stats: dict[str, int | float] = {}
        self._stage_busy_s: dict[tuple[int, int], float] = {}
        self._restarts = restarts or RestartLimit(3, "the workers")
        self._poison_requests = PoisonRequestTracker()
        self._lost_s: float | None = None
        # Keys of blocks that the answers of the batch under way have filled, by request.
        self._filled: dict[str, bytes] = {}
        if log is not None:
            block_manager = scheduler.block_managers[0]
            self._log_event(
                "start", config=asdict(scheduler.config), kv_tokens=block_manager.total_tokens,
                block_tokens=block_manager.block_tokens, latency=describe(scheduler.latency),
                **({} if block_manager.cache is None else {"eviction": block_manager.cache.index.eviction}),
            )  # fmt: skip

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._batches

    @property
    def recovering(self) -> bool:
        """Whether the executor's workers were lost and have not restarted."""
        return self._lost_s is not None

    # -- arrivals -----------------------------------------------------------------------------------------------

    def submit(self, submit: SubmitRequest, prompt: memoryview) -> OutputDelta | None:
        """Admit a request, or return the delta that rejects it."""
        now = self._clock.now()
        try:
            self._admit(submit, prompt, now)
        except (RequestError, OverloadedError, UnavailableError) as error:
            return rejection_delta(submit.id, error, now)
        return None

    def _admit(self, submit: SubmitRequest, prompt: memoryview, now: float) -> None:
        # Requests that were accepted before are not subject to queue limits.
        known = submit.resubmitted or submit.phase == "decode"
        if self.draining and submit.phase != "decode":
            raise UnavailableError("the server is shutting down and takes no new requests")
        if self.scheduler.waiting >= self.info.max_queued_requests and not known:
            raise OverloadedError(f"{self.scheduler.waiting} requests are waiting, which is the limit; try again later")
        # An aborted request stays in the scheduler until its batch in flight is done.
        if submit.id in self._live or submit.id in self.scheduler:
            raise RequestError(f"request id {submit.id!r} is in use", "id")
        most = check_tokens(submit, prompt, self.info)
        # Prompt, and output that an earlier incarnation has emitted.
        known_tokens = submit.prompt_tokens + len(submit.output)
        # A decode computes its last known token itself: KV of all tokens before it must be here.
        if submit.phase == "decode" and self.kv_incomplete(submit.id, known_tokens - 1):
            raise RequestError(f"KV of {submit.id!r} has not all come", "id")
        keys, cached = self.prefixes.look_up(submit, prompt)
        request = Request(
            id=submit.id,
            arrival_s=submit.received_s,
            # For the scheduler, output known before is part of the prompt: its KV is recomputed or staged alike.
            prompt_tokens=known_tokens,
            max_output_tokens=1 if submit.phase == "prefill" else most - len(submit.output),
            cached_tokens=known_tokens - 1 if submit.phase == "decode" else cached,
            slo=submit.slo,
            priority=submit.priority,
        )
        assert submit.phase != "spans", "its agent takes it"
        # The executor first: `add` may reject the request, and only then is there something to undo.
        self.executor.admit(submit.id, prompt, submit.params, submit.output, submit.phase == "decode")
        try:
            if not known:
                refuse_late(self.scheduler, request, now)
            self.scheduler.add(Span.whole(request), now, submit.phase)
        except (RequestError, OverloadedError) as error:
            self.executor.forget(submit.id)
            self.prefixes.forget(submit.id)
            if isinstance(error, PredictedLateError):
                self._count("refused_late_total", 1)
                fields = arrival_fields(request, now)
                self._log_event("refuse", **fields, cached=request.cached_tokens, predicted_s=error.predicted_s)
            raise
        self._live[submit.id] = ScheduledOutput(submit, self.info, keys)
        if submit.timeout_s is not None:
            # The time of receipt identifies the request: an id may be reused before its time-out expires.
            heapq.heappush(self._timeouts, (submit.received_s + submit.timeout_s, submit.id, submit.received_s))
        if self._log is not None:
            phase = {} if submit.phase == "all" else {"phase": submit.phase}
            text = {} if keys is None else {"keys": keys.keys, "cached": cached}
            self._log_event("add", **arrival_fields(request, now), **phase, **text)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> OutputDelta | None:
        """Drop a request at the next chunk edge. None when it has ended already."""
        if self._live.pop(request_id, None) is None:
            self.prefixes.unpin(request_id)
            return None
        now = self._clock.now()
        # False while a batch in flight computes the request: its completion event then drops it from the executor.
        if self.scheduler.abort(request_id, now):
            self.executor.forget(request_id)
        self._log_event("abort", request=request_id, at_s=now)
        return OutputDelta(id=request_id, finish=reason, emitted_s=now)

    def stage(self, request_id: str) -> None:
        """Stop a decode that is to continue on another instance, unless it ends first. Its KV remains staged here.

        The request then appears in `staged`. Unknown ids are ignored.
        """
        if request_id in self._live:
            self._record_staged(self.scheduler.stage(request_id, self._clock.now()))

    def _record_staged(self, events: Iterable[RequestEvent]) -> None:
        for event in events:
            del self._live[event.request]
            self.executor.forget(event.request)
            self.staged.append(OutputDelta(id=event.request, staged=event.tokens))

    # -- one step -----------------------------------------------------------------------------------------------

    def step(self, wait_s: float | None = None) -> list[OutputDelta]:
        """Schedule what fits, execute, update. Returns the deltas for clients.

        `wait_s` bounds the wait for an executor with several batches in flight (None: until one is done). Batches are
        made while the executor would begin them at once, both before and after results are taken.
        """
        deltas = [*self._expire_timeouts(), *self.prefixes.ended()]
        self._submit_batches()
        elsewhere = bool(self.executor.waits_on)
        if not (self._batches or elsewhere):
            return deltas
        try:
            # Wait for the first result only, then take without waiting whatever else has finished.
            result = self.executor.result(wait_s if self._batches or self.recovering else 0.0)
            while result is not None:
                deltas.extend(self._update(result))
                result = self.executor.result(0.0)
        except LostError as error:
            deltas.extend(self._recover_from_loss(str(error)))
        if self._lost_s is not None and self.executor.accepts:
            self._count("recovery_s_total", self._clock.now() - self._lost_s)
            self._lost_s = None
            self._restarts.record_up(self._clock.now())
        if elsewhere:
            self._submit_batches()
        return deltas

    def _recover_from_loss(self, why: str) -> list[OutputDelta]:
        """Restart after all KV and all batches in flight were lost: requests' known tokens are computed again.

        Raises GaveUpError when that has happened too often. Returns the last deltas of requests that were part of too
        many losses (`PoisonRequestTracker`) and are aborted.
        """
        now = self._clock.now()
        # Workers may be lost again while they restart: the recovery time counts from the first loss.
        self._lost_s = now if self._lost_s is None else self._lost_s
        self.prefixes.lost(now)
        # KV tokens lost by each request, and the end of requests that were aborted in flight.
        events = self.scheduler.lost(0, now)
        lost = sum(event.tokens for event in events)
        for event in events:
            if event.kind in ("finished", "aborted"):
                self.executor.forget(event.request)
        self._batches.clear()
        self._count("recoveries_total", 1)
        self._count("lost_tokens_total", lost)
        self._log_event("lost", at_s=now, why=why, tokens=lost)
        log.warning("%s; %d requests go on after a restart, which computes %d tokens again", why, len(self._live), lost)
        self._restarts.spend(now, why)  # raises when the limit is reached
        limit, ended = self._restarts.limit, []
        for name in self._poison_requests.record_loss(
            (event.request for event in events if event.tokens), self._live, limit
        ):
            self.abort(name, "error")
            words = f"the request was given up: it was being computed at {limit + 1} losses of workers, at last: {why}"
            ended.append(OutputDelta(id=name, finish="error", error=words, emitted_s=now))
        # Last: requests that are given up are forgotten before the new ranks get the live ones.
        self.executor.recover()
        return ended

    def _submit_batches(self) -> None:
        """Schedule and submit batches while the executor would begin them at once."""
        while self.executor.accepts:
            now, free = self._clock.now(), self.executor.free
            batch = self.scheduler.schedule(now, 1, free)
            if batch is None:
                return
            self._batches[batch.id], self.iteration = (batch, now), (now, batch.predicted_s)
            # Logged only where some KV groups were busy.
            some = free is not None and len(free) < len(self.scheduler.block_managers)
            self._log_event("schedule", id=batch.id, at_s=now, **({"free": free} if some else {}))
            self._count("schedule_s_total", self._clock.now() - now)
            self.executor.submit(batch)
            self.iteration = None

    def _update(self, result: StepResult) -> list[OutputDelta]:
        """Complete a batch: count its tokens, update the scheduler, and return the deltas."""
        deltas: list[OutputDelta] = []
        batch, submitted_s = self._batches.pop(result.batch_id)
        now = self._clock.now()
        progress: list[RequestProgress] = []
        for emitted in result.emitted:
            deltas.extend(self._emit(emitted, now, submitted_s, progress))
        self._take_events(self.scheduler.complete(batch.id, progress, now, result.elapsed_s), submitted_s)
        self._account(batch, result, now, progress)
        # When the scheduler has let go of them: until then their blocks are in use anyway.
        deltas += self.prefixes.pin_computed(now, self._live.values(), batch)
        return deltas

    def _take_events(self, events: Iterable[RequestEvent], submitted_s: float) -> None:
        """Note what a batch that was submitted at `submitted_s` has changed in the scheduler."""
        for event in events:
            if event.kind == "started" and event.request in self._live:
                self._started(self._live[event.request], submitted_s)
            elif event.kind in ("finished", "aborted"):
                self.executor.forget(event.request)
            elif event.kind == "staged":
                self._record_staged((event,))
            elif event.kind == "preempted":
                self._count("preemptions_total", 1)
                self._count("recomputed_tokens_total", event.tokens)

    def _emit(
        self, emitted: EmittedToken, now: float, submitted_s: float, progress: list[RequestProgress]
    ) -> list[OutputDelta]:
        live = self._live.get(emitted.request)
        if live is None:  # aborted while in flight
            # 0 tokens, finished: the scheduler frees the request when the batch completes.
            progress.append(RequestProgress(emitted.request, 0, True))
            return []
        # A request may emit in its first batch: the "started" event comes after the tokens.
        self._started(live, submitted_s)
        if live.keys is not None and live.keys.append(emitted.token):
            self._filled[live.submit.id] = live.keys.keys[-1]
        delta = live.take(emitted, now) if not live.submit.pin else self.prefixes.computed(live, now)
        ended = delta.finish is not None or live.submit.pin
        progress.append(RequestProgress(emitted.request, 1, ended))
        if ended:
            del self._live[emitted.request]
        return [delta]

    def _started(self, live: ScheduledOutput, submitted_s: float) -> None:
        """Note a request's first batch, and what of its prompt came from the prefix cache."""
        if live.first_scheduled_s is not None:
            return
        live.first_scheduled_s = submitted_s
        if live.keys is not None and live.submit.phase != "decode":
            live.cached_tokens, live.saved_s = self.prefixes.taken(live.submit.id)

    def _expire_timeouts(self) -> list[OutputDelta]:
        deltas = []
        now = self._clock.now()
        while self._timeouts and self._timeouts[0][0] <= now:
            _, request_id, received_s = heapq.heappop(self._timeouts)
            live = self._live.get(request_id)
            if live is None or live.submit.received_s != received_s:  # it has ended; its id may be in use again
                continue
            delta = self.abort(request_id, "timeout")
            if delta is not None:
                deltas.append(delta)
        return deltas

    # -- counters -----------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return a snapshot for metrics."""
        caches = [manager.cache for manager in self.scheduler.block_managers if manager.cache is not None]
        return EngineStats(
            prefix_queries_total=sum(cache.queried_tokens for cache in caches),
            prefix_hits_total=sum(cache.hit_tokens for cache in caches),
            kv_tokens_cached=sum(block_manager.cached_tokens for block_manager in self.scheduler.block_managers),
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            in_flight=len(self._batches),
            kv_tokens_used=sum(block_manager.used_tokens for block_manager in self.scheduler.block_managers),
            kv_tokens_total=sum(block_manager.total_tokens for block_manager in self.scheduler.block_managers),
            stage_busy_s=tuple((*key, busy_s) for key, busy_s in sorted(self._stage_busy_s.items())),
            recovering=self.recovering,
            log_problem=(self._log.lines.problem or "") if isinstance(self._log, LogSink) else "",
            late=sum(policy.late for policy in group_policies(self.scheduler)),
            **self._stats,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        """Close the executor."""
        self.executor.close()

    def computed(self, prefill: int, decodes: int) -> None:
        """Count tokens computed outside the scheduler: this instance's share of a span."""
        self._count("prefill_tokens_total", prefill)
        self._count("run_tokens_total", prefill)
        self._count("decode_tokens_total", decodes)

    def _account(self, batch: Batch, result: StepResult, now: float, progress: list[RequestProgress]) -> None:
        elapsed_s, decodes = result.elapsed_s, sum(part.decodes.count for part in batch.parts)
        prefill = sum(chunk.tokens for part in batch.parts for chunk in part.prefills)
        self._count_busy(batch, result)
        self._count("prefill_tokens_total", prefill)
        self._count("decode_tokens_total", decodes)
        self._count("iterations_total", 1)
        work = AttentionWork.of(batch)
        self._count("passes_total", sum(part.tokens > 0 for part in batch.parts))
        self._count("kv_read_tokens_total", work.kv_tokens)
        self._count("attention_pairs_total", work.pairs)
        self._count("busy_s_total", elapsed_s)
        self._count("predicted_s_total", batch.predicted_s)
        self._stats["last_chunk_tokens"] = prefill
        self._stats["last_iteration_s"] = elapsed_s
        if self._log is not None:
            fields = batch_fields(batch, elapsed_s, result.stages, progress, now) | group_fields(batch)
            self._log_event("batch", **fields, **({"filled": self._filled} if self._filled else {}))
        self._filled = {}

    def _count_busy(self, batch: Batch, result: StepResult) -> None:
        for part, stages in zip(batch.parts, result.stages, strict=False):
            for stage, (start_s, end_s) in enumerate(stages):
                key = (part.group, stage)
                self._stage_busy_s[key] = self._stage_busy_s.get(key, 0.0) + end_s - start_s

    def _count(self, name: str, amount: float) -> None:
        self._stats[name] = self._stats.get(name, 0) + amount

    def _log_event(self, kind: str, **fields: object) -> None:
        if self._log is not None:
            self._log(kind, fields)
