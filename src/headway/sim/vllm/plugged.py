"""Headway's policy in the simulated vLLM: the same driver, gate and pledges as `headway.vllm`, at the same seams."""

from __future__ import annotations

from headway.core.request import Request
from headway.perf.latency.base import LatencyModel
from headway.policy.hosted.driver import PolicyDriver, StepPlan
from headway.policy.hosted.gate import GatedQueueMethods
from headway.policy.hosted.reserved_kv_pool import ReservedKvPool
from headway.policy.hosted.step_clock import StepClock
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.sim.vllm.scheduler import VllmScheduler, VllmStep
from headway.sim.vllm.vllm_request import VllmRequestState


class PluggedPolicy:
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

    def added(self, request: VllmRequestState) -> None:
        """See `SchedulerPlugin`."""
        if self._driver is not None:
            self._driver.enter(self._facts(request, self._scheduler.cached_tokens(request)), request)

    def before(self, now: float) -> None:
        """See `SchedulerPlugin`."""
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

    def cap(self, request: VllmRequestState, tokens: int) -> int:
        """See `SchedulerPlugin`."""
        if self._plan is None or self._driver is None:
            return tokens
        quota = self._driver.quota(self._plan, request.request_id, request.running)
        return tokens if quota is None else min(quota, tokens)

    def after(self, step: VllmStep, now: float) -> None:
        """See `SchedulerPlugin`."""
        if self._plan is not None and self._driver is not None:
            load = self._driver.scheduled(self._plan, step.tokens)
            self._clock.made(step.number, now, load, self._plan.predicted_s)

    def preempted(self, request: VllmRequestState) -> None:
        """See `SchedulerPlugin`."""
        if self._driver is not None:
            self._driver.lost(request)

    def returned(self, step: VllmStep, now: float) -> None:
        """See `SchedulerPlugin`."""
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
