"""The scheduler class that vLLM loads, and all that depends on vLLM's internals.

Written for the seams of the versions in `plugin.KNOWN`. vLLM's `schedule()` runs unchanged: before it, the
waiting queue shows the policy's choice only and prefills get quotas; after it, the policy's cursors follow vLLM's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.request import RequestStatus

from headway.core.logs import LogSink
from headway.core.request import Request
from headway.policy.hosted.driver import (
    GatedQueueMethods,
    PolicyDriver,
    ReservedKvPool,
    StepClock,
    StepPlan,
    fill_graph,
)
from headway.policy.hosted.log import DriverLog, RecordingDriver
from headway.policy.hosted.report import HostStats, PrefillReport
from headway.policy.hosted.settings import VllmSettings
from headway.policy.iteration.decision import IterationPolicy
from headway.vllm import adapter, plugin
from headway.vllm.latency import latency_model
from headway.vllm.metrics import SnapshotFile, snapshot_path
from headway.vllm.middleware import read_slo

logger = logging.getLogger("vllm.headway")  # below vLLM's logger, so that its handlers and levels hold

_REPORT_S = 60.0
"""Seconds between two log lines on decision times and prediction errors."""


class _GatedRequestQueue(GatedQueueMethods, RequestQueue):
    """vLLM's queue interface behind the gate."""


class Scheduler:
    """`--scheduler-cls headway.vllm.Scheduler`. Makes a scheduler over the base class that vLLM itself would take."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises ConfigError for a vLLM whose scheduler is not known, and for impossible settings."""
        digests = plugin.digests(VllmScheduler)
        warning = plugin.require_known(plugin.compare(adapter.version(), digests))
        if warning is not None:
            logger.warning(warning)
        adapter.refuse_held_prefills(vllm_config)
        chosen = _AsyncHeadwayScheduler if vllm_config.scheduler_config.async_scheduling else _SyncHeadwayScheduler
        return chosen(vllm_config, *args, **kwargs)


class HeadwaySchedulerMethods:
    """Overrides of vLLM's scheduler, as a mixin over its synchronous or asynchronous class.

    An exception in the policy costs one step in stock order; the policy is then rebuilt from vLLM's own state. After
    `max_errors` exceptions the stock order is used for good.
    """

    headway_clock: Callable[[], float] = staticmethod(time.monotonic)
    headway_wall_clock: Callable[[], float] = staticmethod(time.time)
    """The clock that vLLM stamps arrivals with."""
    headway_stopwatch: Callable[[], float] = staticmethod(time.perf_counter)
    """The clock that times decisions."""

    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.headway_errors = 0
        self.headway_stats = HostStats()
        self._headway_settings: VllmSettings = adapter.settings_of(vllm_config)
        self._headway_latency, start = latency_model(self._headway_settings, adapter.engine_facts(vllm_config))
        self.waiting = _GatedRequestQueue(self.waiting)
        self._headway_plan: StepPlan | None = None
        self._headway_clock = StepClock()
        # Ids of waiting requests that the policy does not decide about.
        self._headway_off: set[str] = set()
        # Requests that wait for a grammar to be compiled, by id.
        self._headway_blocked: dict[str, Any] = {}
        self._headway_graphs = adapter.graph_sizes(vllm_config)
        self._headway_reported_s = 0.0
        self._headway_snapshots = SnapshotFile(snapshot_path(vllm_config, adapter.engine_index(vllm_config)))
        self._headway_log = self._open_log(vllm_config)
        self._headway = self._make_driver()
        aim_ms = self._headway_settings.t_target_ms
        aim = "the machine's aim" if aim_ms is None else f"at most {aim_ms:g} ms"
        logger.info(
            "Headway schedules prefills: policy %s, steps of %s beside decodes, starts from %s",
            self._headway_settings.policy,
            aim,
            start,
        )

    # -- what vLLM calls ----------------------------------------------------------------------------------------

    def add_request(self: Any, request: Any) -> None:
        """Add a new request, or more input for one that streams."""
        fresh = request.request_id not in self.requests
        super().add_request(request)
        if fresh:
            self._guard(self._enter, request)

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the policy's decision, call vLLM's `schedule()`, and move the policy to what vLLM has scheduled."""
        began_s, started_s = self.headway_clock(), self.headway_stopwatch()
        if not self._guard(self._decide, began_s):
            self._headway_plan = None
            self.waiting.open()
        decided_s = self.headway_stopwatch()
        output = super().schedule(*args, **kwargs)
        returned_s = self.headway_stopwatch()
        # Outside `schedule()` the queue is everyone who waits.
        self.waiting.open()
        if self._headway_plan is not None and output.total_num_scheduled_tokens:
            self._guard(self._note, output, began_s)
        self.headway_stats.decided(decided_s - started_s + self.headway_stopwatch() - returned_s)
        # vLLM calls once more after its last request, then not before the next one comes.
        if self._headway_active and not self.requests:
            self._guard(self._publish, began_s)
        return output

    def _reserve_prefill_lookahead(self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Cap a chunk at its quota.

        vLLM calls this last in both of its loops; of several wrappers the least cap wins."""
        tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        quota = self._quota(request)
        # A quota to the prompt's end takes the speculative tokens with it that vLLM adds there.
        if quota is None or tokens <= quota or request.num_tokens - num_computed_tokens <= quota:
            return tokens
        # Ask again for the smaller chunk: vLLM's own reserve depends on its end.
        return min(quota, super()._reserve_prefill_lookahead(request, num_computed_tokens, quota))

    def _mamba_block_aligned_split(self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Cap a chunk of a hybrid model at its quota, before vLLM rounds it down to a state boundary."""
        quota = self._quota(request)
        tokens = num_new_tokens if quota is None else min(num_new_tokens, quota)
        if tokens == 0:
            return 0
        split: int = super()._mamba_block_aligned_split(request, tokens, *args, **kwargs)
        return split

    def _preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        """Preempt a request in vLLM, and requeue it in the policy."""
        super()._preempt_request(request, *args, **kwargs)
        if self._headway is not None:
            self._guard(self._headway.lost, request)

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Apply a step's results, and let the latency model learn its duration."""
        before = None if self._headway_log is None else set(self.finished_req_ids)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if before is not None:
            self._guard(self._headway_log.finished, self.finished_req_ids - before)
        if self._headway_active and scheduler_output.total_num_scheduled_tokens:
            self._guard(self._measured, scheduler_output, self.headway_clock())
        return outputs

    def shutdown(self: Any) -> None:
        """End the engine."""
        super().shutdown()
        self._headway_snapshots.close()

    # -- decisions ----------------------------------------------------------------------------------------------

    @property
    def _headway_active(self) -> bool:
        return self.headway_errors < self._headway_settings.max_errors

    def _guard(self: Any, call: Any, *args: Any) -> bool:
        """Call a part of the policy. False, or an exception: this step goes in stock order."""
        if not self._headway_active:
            return False
        try:
            return call(*args) is not False
        except Exception:
            self.headway_errors += 1
            off = not self._headway_active
            if self.headway_errors == 1 or off:
                then = "the stock order stays from now on" if off else "this step goes in stock order"
                logger.exception("Headway's policy failed (%d): %s", self.headway_errors, then)
            # The gate stays as it is: vLLM may be in the middle of its scan. `schedule` opens it.
            self._headway_plan = None
            self._headway = None
            return False

    def _decide(self: Any, now: float) -> bool:
        """Compute quotas and show the waiting requests that may run. False: this step goes in stock order."""
        if self._headway is None:
            self._rebuild()
        driver: PolicyDriver = self._headway
        # Ended requests first: their blocks are free again.
        for name in sorted(self.finished_req_ids):  # a set: its order must not reach the policy
            again = self.requests.get(name)
            # Unless a new request has the same id.
            if again is None or again.is_finished():
                self._forget(name, now)
        if self._headway_blocked:
            self._enter_unblocked()
        running: list[Any] = self.running
        room = len(running) + self.num_waiting_for_streaming_input < adapter.most_active(self)
        adapter.put_back(self, driver.prefills)
        off = [r for r in self.waiting if r.request_id in self._headway_off] if self._headway_off else []
        barred = self._barred(off, now)
        planned = driver.plan_step(running, now, room, 1 + self.num_spec_tokens, barred)
        if planned is None:
            # Rebuilt in the next step.
            self._headway = None
            return False
        plan, self.running = planned
        if self._headway_graphs and plan.quotas:
            plan = fill_graph(plan, self._headway_graphs, driver.policy.holders)
        visible = [r for r in off if r.request_id not in barred]
        begun = driver.prefills
        visible += [begun[name] for name in plan.quotas if begun[name].status != RequestStatus.RUNNING]
        self.waiting.show([r for r in visible if not adapter.holds_kv_blocks(self, r)])
        self._headway_plan = plan
        return True

    def _quota(self: Any, request: Any) -> int | None:
        """Return the tokens that a prefill may take in this step; None: no limit by the policy, or it has failed."""
        found: list[int | None] = []
        if self._headway_plan is not None:
            self._guard(lambda: found.append(self._planned_quota(request)))
        return found[0] if found else None

    def _planned_quota(self: Any, request: Any) -> int | None:
        """Return the quota of a request in the plan of this step."""
        plan = self._headway_plan
        quota: int | None = self._headway.quota(plan, request.request_id, request.status == RequestStatus.RUNNING)
        # vLLM gives the slot of an adapter without tokens to requests that it takes past the gate.
        if quota == 0 and request.lora_request is not None and adapter.past_gate(self):
            return int(self._headway.policy.config.min_chunk)
        return quota

    def _barred(self: Any, off: list[Any], now: float) -> Collection[str]:
        """See `adapter.barred`. `off`: waiting requests that the policy does not decide about."""
        prefills = self._headway.prefills
        if not adapter.may_bar(self, chain(off, prefills.values())):
            # Saves the order of the whole queue.
            return ()
        in_order = (prefills[state.request.id] for state in self._headway.policy.order(now))
        return adapter.barred(self, [*off, *(r for r in in_order if r.status != RequestStatus.RUNNING)])

    def _note(self: Any, output: Any, began_s: float) -> None:
        """Move the policy's cursors to what vLLM has scheduled."""
        driver, plan = self._headway, self._headway_plan
        load = driver.scheduled(plan, output.num_scheduled_tokens)
        self._headway_off.difference_update(output.num_scheduled_tokens)
        self._headway_clock.made(id(output), began_s, load, plan.predicted_s)
        self.headway_stats.slo.scheduled(id(output), driver.completed)

    def _publish(self: Any, now: float) -> None:
        """Write what `/metrics` shows."""
        learned = {"prefill_s": self._headway_report.points()}
        self._headway_snapshots.write(now, self.headway_stats.snapshot(self.headway_errors) | learned)

    def _measured(self: Any, output: Any, now: float) -> None:
        """Pass the measured duration of a step to the latency model, and log errors every `_REPORT_S`."""
        stats: HostStats = self.headway_stats
        stats.slo.returned(id(output), now)
        if self._headway_snapshots.due(now):
            self._publish(now)
        step = self._headway_clock.returned(id(output), now)
        if step is None or self._headway is None:
            return
        load, seconds, predicted_s = step
        self._headway.observed(load, seconds)
        stats.measured(seconds, predicted_s)
        if now - self._headway_reported_s >= _REPORT_S:
            self._headway_reported_s = now
            logger.info(
                "Headway: decisions take %.0f us (median), step times are predicted to %.0f%%, %d policy errors",
                1e6 * stats.median_s,
                100 * stats.error_share,
                self.headway_errors,
            )

    # -- requests -----------------------------------------------------------------------------------------------

    def _forget(self: Any, name: str, now: float) -> None:
        """Remove a request that has ended."""
        self._headway.ended(name)
        self.headway_stats.slo.ended(name, now)
        self._headway_off.discard(name)
        self._headway_blocked.pop(name, None)

    def _enter(self: Any, request: Any) -> None:
        """Add a request to the policy, unless it is one that must not wait."""
        if self._headway is not None and request.request_id in self.finished_req_ids:
            # Its id is that of a request which has ended since the last step.
            self._forget(request.request_id, self.headway_clock())
        if not adapter.decidable(request):
            self._headway_off.add(request.request_id)
        elif request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self._headway_blocked[request.request_id] = request
        elif self._headway is not None:  # else all requests enter when the driver is made
            cached = self._cached_tokens(request)
            self._headway.enter(self._facts(request, cached), request)

    def _enter_unblocked(self: Any) -> None:
        """Add requests whose grammar is compiled. One whose grammar failed is shown, for vLLM to refuse it."""
        for name, request in list(self._headway_blocked.items()):
            grammar = request.structured_output_request.grammar
            if grammar is None:
                continue
            del self._headway_blocked[name]
            if isinstance(grammar, Exception):
                self._headway_off.add(name)
            else:
                cached = self._cached_tokens(request)
                self._headway.enter(self._facts(request, cached), request)

    def _rebuild(self: Any) -> None:
        """Rebuild the policy from vLLM's state."""
        self._headway = driver = self._make_driver()
        self._headway_off.clear()
        self._headway_blocked.clear()
        running = {r.request_id for r in self.running}
        for request in list(self.requests.values()):
            if request.is_finished():
                continue
            if request.request_id not in running:
                self._enter(request)
            elif adapter.decidable(request):
                driver.enter(self._facts(request, request.num_computed_tokens), request, running=True)

    def _make_driver(self: Any) -> PolicyDriver:
        """Return a driver without requests, over vLLM's block pool."""
        pool_blocks = self.kv_cache_manager.block_pool
        groups = max(1, len(self.kv_cache_config.kv_cache_groups))
        # One block is the null block.
        n_blocks = self.cache_config.num_gpu_blocks - 1
        watermark = getattr(self.kv_cache_manager, "watermark_blocks", 0)
        log: DriverLog | None = self._headway_log
        free, needed = lambda: pool_blocks.get_num_free_blocks() - watermark, self._needed_blocks
        if log is not None:
            free, needed = log.watched(free, needed)
        total_tokens = max(n_blocks // groups * self.block_size, self.max_model_len)
        pool = ReservedKvPool(n_blocks, total_tokens, free, needed, self.block_size)
        least = self.cache_config.block_size if self.need_mamba_block_aligned_split else 1
        config = self._headway_settings.scheduler_config(
            adapter.most_active(self),
            self.max_num_scheduled_tokens,
            max(least, self.num_prefill_lookahead),
            self.parallel_config.pipeline_parallel_size,
        )
        self._headway_report = PrefillReport(self._headway_latency, config, self.max_model_len)
        policy = IterationPolicy(config, self._headway_latency, pool)
        return PolicyDriver(policy, pool) if log is None else RecordingDriver(policy, pool, log, self.block_size)

    def _open_log(self: Any, vllm_config: Any) -> DriverLog | None:
        """Open the decision log, where one is asked for; each data-parallel rank has its own."""
        path, parallel = self._headway_settings.log, vllm_config.parallel_config
        if path is None:
            return None
        rank = f".{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
        asynchronous = vllm_config.scheduler_config.async_scheduling
        host = {"engine": "vllm", "version": adapter.version(), "asynchronous": asynchronous}
        return DriverLog(LogSink(f"{path}{rank}"), lambda: self.headway_clock(), host)

    def _cached_tokens(self: Any, request: Any) -> int:
        """Return how many tokens of a prompt need no work: the hit, less a window that some models compute again."""
        cached = self.kv_cache_manager.get_computed_blocks(request)[1]
        replayed = getattr(self, "prefix_replay_tokens", 0)
        return 0 if cached <= replayed else int(cached - replayed)

    def _needed_blocks(self: Any, request_id: str, tokens: int) -> int:
        request = self.requests.get(request_id)
        return 0 if request is None else adapter.needed_blocks(self, request, tokens)

    def _facts(self: Any, request: Any, computed: int) -> Request:
        """Return a request as the policy sees it, with its arrival converted to the monotonic clock."""
        tokens = request.num_tokens
        return Request(
            id=request.request_id,
            arrival_s=self.headway_clock() - max(0.0, self.headway_wall_clock() - request.arrival_time),
            prompt_tokens=tokens,
            max_output_tokens=max(1, request.max_tokens - request.num_output_tokens),
            cached_tokens=max(0, min(computed, tokens - 1)),
            slo=self._headway_settings.slo_of(read_slo(request.sampling_params.extra_args), tokens),
            priority=request.priority,
        )


class _SyncHeadwayScheduler(HeadwaySchedulerMethods, VllmScheduler):
    """For synchronous vLLM: a step is scheduled after the previous one has returned."""


class _AsyncHeadwayScheduler(HeadwaySchedulerMethods, AsyncScheduler):
    """For asynchronous vLLM: a step is scheduled while the previous one runs."""
