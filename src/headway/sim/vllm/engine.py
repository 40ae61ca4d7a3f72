"""One simulated vLLM engine: its loop in virtual time around `VllmScheduler`, with or without Headway's policy at the
seams of `headway.vllm`.

Synchronous: a step is scheduled when the one before has returned. Asynchronous: one step ahead, while the one before is
computed, so that a request which arrives meanwhile waits for that step too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace
from typing_extensions import override

from headway.core.errors import RequestError
from headway.core.request import Request
from headway.perf.latency.base import BatchLoad, LatencyModel, beside_prompts, decode_load, load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.policy.hosted.driver import GatedQueueMethods, PolicyDriver, ReservedKvPool, StepClock, StepPlan
from headway.policy.hosted.settings import TRUST_PROFILE
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.sim.engine import DecodeTrack, ReplicaCounters
from headway.sim.result import IterationRecord, ReplicaUse
from headway.sim.spec import InstanceSpec, NoiseSource, VllmSpec
from headway.sim.vllm.scheduler import SchedulerPlugin, VllmRequestState, VllmScheduler, VllmStep


class PluggedPolicy(SchedulerPlugin):
    """Plugin of one scheduler (`SchedulerPlugin`)."""

    def __init__(self, scheduler: VllmScheduler, config: SchedulerConfig, latency: LatencyModel) -> None:
        self._scheduler = scheduler
        self._config = config
        self._latency = latency
        self._gate = GatedQueueMethods(scheduler.waiting)
        scheduler.waiting = self._gate
        scheduler.plugin = self
        self._clock = StepClock()
        self._plan: StepPlan | None = None
        # None: it is rebuilt from the scheduler's state before the next step.
        self._driver: PolicyDriver | None = self._make_driver()

    # -- seams --------------------------------------------------------------------------------------------------

    @override
    def added(self, request: VllmRequestState) -> None:
        if self._driver is not None:
            self._driver.enter(self._facts(request, self._scheduler.cached_tokens(request)), request)

    @override
    def before(self, now: float) -> None:
        scheduler = self._scheduler
        driver = self._driver = self._driver or self._rebuilt()
        for name in scheduler.ended:
            driver.ended(name)
        room = len(scheduler.running) < scheduler.spec.max_num_seqs
        planned = driver.plan_step(scheduler.running, now, room)
        if planned is None:
            self._plan = self._driver = None
            self._gate.open()
            return
        plan, scheduler.running = planned
        self._plan = plan
        chosen = (driver.prefills[name] for name in plan.quotas)
        self._gate.show([request for request in chosen if not request.running])

    @override
    def cap(self, request: VllmRequestState, tokens: int) -> int:
        if self._plan is None or self._driver is None:
            return tokens
        quota = self._driver.quota(self._plan, request.request_id, request.running)
        return tokens if quota is None else min(quota, tokens)

    @override
    def after(self, step: VllmStep, now: float) -> None:
        if self._plan is not None and self._driver is not None:
            load = self._driver.scheduled(self._plan, step.tokens)
            self._clock.made(step.number, now, load, self._plan.predicted_s)

    @override
    def preempted(self, request: VllmRequestState) -> None:
        if self._driver is not None:
            self._driver.lost(request)

    @override
    def returned(self, step: VllmStep, now: float) -> None:
        measured = self._clock.returned(step.number, now)
        if measured is not None and self._driver is not None:
            load, seconds, _predicted_s = measured
            self._driver.observed(load, seconds)

    # -- state --------------------------------------------------------------------------------------------------

    def _make_driver(self) -> PolicyDriver:
        """Return a driver without requests, over the scheduler's blocks."""
        spec, blocks = self._scheduler.spec, self._scheduler.pool
        watermark = int(spec.watermark * spec.num_blocks)
        pool = ReservedKvPool(
            spec.usable_blocks,
            max(spec.usable_blocks * spec.block_size, spec.longest_request),
            lambda: blocks.free_blocks - watermark,
            self._needed_blocks,
            spec.block_size,
        )
        return PolicyDriver(IterationPolicy(self._config, self._latency, pool), pool)

    def _rebuilt(self) -> PolicyDriver:
        """Return a driver with all requests of the scheduler."""
        driver = self._make_driver()
        for request in self._scheduler.requests.values():
            if request.running:
                driver.enter(self._facts(request, request.num_computed_tokens), request, running=True)
            else:
                driver.enter(self._facts(request, self._scheduler.cached_tokens(request)), request)
        return driver

    def _needed_blocks(self, name: str, tokens: int) -> int:
        if name not in self._scheduler.requests:
            return 0
        return self._scheduler.pool.needed_blocks(name, min(tokens, self._scheduler.spec.longest_request))

    @staticmethod
    def _facts(request: VllmRequestState, computed: int) -> Request:
        """Return a request as the policy sees it, with `computed` tokens that need no work."""
        tokens, facts = request.num_tokens, request.facts
        return Request(
            id=facts.id,
            arrival_s=facts.arrival_s,
            prompt_tokens=tokens,
            max_output_tokens=max(1, request.max_tokens - request.num_output_tokens),
            cached_tokens=max(0, min(computed, tokens - 1)),
            slo=facts.slo,
            priority=facts.priority,
        )


@dataclass(frozen=True)
class _StepInFlight:
    step: VllmStep
    end_s: float


class SimulatedVllm:
    """The engine of one replica. Calls must come in order of virtual time."""

    def __init__(
        self,
        index: int,
        spec: InstanceSpec,
        vllm: VllmSpec,
        noise: NoiseSource,
        iterations: list[IterationRecord] | None,
        stopwatch: Callable[[], float] | None = None,
    ) -> None:
        self.index, self.spec = index, spec
        self.prefixes = None
        # of a cluster's engines that share instances, which servers do not
        self.fused_s = self.fused_until_s = 0.0
        self.tracks: dict[str, DecodeTrack] = {}
        self.scheduler = VllmScheduler(vllm)
        self.latency: LatencyModel = CorrectedLatency(spec.latency, TRUST_PROFILE) if spec.learns else spec.latency
        if vllm.plugged is not None:
            PluggedPolicy(self.scheduler, vllm.plugged, self.latency)
        self._vllm = vllm
        self._actual_latency = spec.actual_latency or spec.latency
        self._idle_s = spec.serving.idle_s
        self._noise = noise
        self._iteration_rows = iterations
        self._stopwatch = stopwatch
        self._in_flight: deque[_StepInFlight] = deque()
        # Whether a step has returned since the last one was scheduled.
        self._returned = False
        self._free_s = 0.0
        self._counts = ReplicaCounters()

    # -- events -------------------------------------------------------------------------------------------------

    def add(self, track: DecodeTrack, now: float) -> None:
        """Admit a request. Raises RequestError when it is longer than vLLM allows or its KV can hold."""
        request, most = track.request, self._vllm.longest_request
        # Priorities are vLLM's setting: Headway's own engine orders by urgency.
        priority = self._vllm.priorities.get(track.source.klass, 0)
        if request.prompt_tokens >= most:
            raise RequestError(f"a prompt of {request.prompt_tokens:,} tokens; at most {most - 1:,} fit")
        self.tracks[request.id] = track
        track.replica = self.index
        self.scheduler.add(VllmRequestState(replace(request, priority=priority), track.left))

    def abort(self, track: DecodeTrack, now: float, error: str) -> None:
        """Abort a request; what it has in a step in flight is computed in vain."""
        self.scheduler.abort(track.request.id)
        self._end(track, now, error)

    def start_batches(self, now: float, quiet_s: float) -> list[tuple[float, int]]:
        """Schedule steps, unless one is awaited. Return (time, step) at which to call `complete`."""
        if self._in_flight and not self._returned:
            return []
        self._returned = False
        begun: list[tuple[float, int]] = []
        while len(self._in_flight) < (2 if self._vllm.async_scheduling else 1):
            started_s = self._stopwatch() if self._stopwatch is not None else 0.0
            step = self.scheduler.schedule(now)
            if self._stopwatch is not None:
                self._counts.scheduling_s += self._stopwatch() - started_s
            self._counts.preemptions += len(step.preempted)
            if not step.tokens:
                # The only running request has lost its KV: it may begin again at once.
                if step.preempted and not self._in_flight:
                    continue
                break
            end_s = self._start(step, now)
            begun.append((end_s, step.number))
        return begun

    def complete(self, batch_id: int, now: float) -> list[DecodeTrack]:
        """Apply the results of the oldest step in flight. Return the tracks that it ended."""
        done = self._in_flight.popleft()
        self._returned = True
        got, ended = self.scheduler.update(done.step, now)
        for name in got:
            self.tracks[name].times.append(now)
        tracks = [self.tracks[name] for name in ended]
        for track in tracks:
            self._end(track, now, None)
        return tracks

    def __contains__(self, request: str) -> bool:
        """Whether a request is here, or has left before the end of a step that computes it."""
        return request in self.tracks or any(request in flying.step.tokens for flying in self._in_flight)

    @property
    def used_tokens(self) -> int:
        """Tokens of the KV blocks that requests hold."""
        return self.scheduler.pool.used_blocks * self._vllm.block_size

    def is_in_flight(self, batch_id: int) -> bool:
        """Return whether a step is in flight."""
        return any(flying.step.number == batch_id for flying in self._in_flight)

    def busy_until_s(self) -> float:
        """Return the virtual time at which the last step in flight ends; 0.0: there is none."""
        return self._free_s if self._in_flight else 0.0

    def end_repeats(self, now: float) -> tuple[float, int] | None:
        """As of `SimulatedEngine`: no steps are repeated."""
        return None

    def prompt_progress(self, batch_id: int) -> list[tuple[str, int, bool]]:
        steps = [flying.step for flying in self._in_flight if flying.step.number == batch_id]
        return [
            (
                name,
                step.past[name] + tokens,
                step.past[name] + tokens >= self.scheduler.requests[name].num_prompt_tokens,
            )
            for step in steps
            for name, tokens in step.tokens.items()
            if name in self.tracks and not self._decodes(step, name)
        ]

    # -- steps --------------------------------------------------------------------------------------------------

    def _start(self, step: VllmStep, now: float) -> float:
        """Put a step in flight behind those that are. Return its end."""
        load = self._load(step, self._actual_latency)
        seconds = load_s(self._actual_latency, load)
        seconds *= self._noise.factor(seconds)
        # The engine had nothing to do.
        if not self._in_flight and self._free_s < now:
            seconds += self._idle_s
        start_s = max(now, self._free_s)
        self._free_s = end_s = start_s + seconds
        self._counts.busy_s += seconds
        self._in_flight.append(_StepInFlight(step, end_s))
        self._count(step, load, now)
        if self._iteration_rows is not None:
            self._iteration_rows.append(self._row(step, load, start_s, end_s))
        return end_s

    def _row(self, step: VllmStep, load: BatchLoad, start_s: float, end_s: float) -> IterationRecord:
        chunks = [(name, step.past[name], n) for name, n in step.tokens.items() if not self._decodes(step, name)]
        predicted_s = load_s(self.latency, self._load(step, self.latency))
        times = ((start_s, end_s),)
        return IterationRecord(
            self.index, step.number, times, end_s, load.decodes, load.decode_kv, tuple(chunks), predicted_s, 1
        )

    def _load(self, step: VllmStep, latency: LatencyModel) -> BatchLoad:
        """Return the load of a step: its decodes, then each chunk with its history."""
        decodes = [name for name in step.tokens if self._decodes(step, name)]
        load = decode_load(latency, len(decodes), sum(step.past[name] for name in decodes))
        for name, tokens in step.tokens.items():
            if not self._decodes(step, name):
                past = step.past[name]
                load = load.with_chunk(tokens, beside_prompts(latency, load).attention_s(past, tokens), past)
        return load

    def _decodes(self, step: VllmStep, name: str) -> bool:
        """Whether a request's row is one of an output token."""
        return step.tokens[name] == 1 and step.past[name] >= self.scheduler.requests[name].num_prompt_tokens

    def _count(self, step: VllmStep, load: BatchLoad, now: float) -> None:
        counts = self._counts
        counts.iterations += 1
        counts.batches += 1
        counts.decoded += load.decodes
        counts.kv_read += load.decode_kv
        counts.pairs += load.decode_kv
        for name, tokens in step.tokens.items():
            track = self.tracks[name]
            if track.scheduled_s is None:
                track.scheduled_s = now
            if not self._decodes(step, name):
                counts.chunk(step.past[name], tokens)
        counts.kv_peak = max(counts.kv_peak, self.used_tokens)

    def _end(self, track: DecodeTrack, now: float, error: str | None) -> None:
        track.ended_s, track.error = now, error
        del self.tracks[track.request.id]

    def use(self, until_s: float) -> ReplicaUse:
        """Return the replica's counters up to `until_s`."""
        self._counts.recomputed = self.scheduler.recomputed_tokens
        return self._counts.use(max(0.0, self._free_s - until_s))
