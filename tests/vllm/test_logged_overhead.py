"""A plug-in's log says what an engine takes beside its steps, and how far the profile is from its steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from tests.helpers.unit_latency import small_machine

from headway.core.request import Request
from headway.perf.latency.base import load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.table import ServingOverhead
from headway.policy.hosted.driver import ReservedKvPool
from headway.policy.hosted.log import DriverLog, RecordingDriver
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.medha import MedhaConfig
from headway.serving.load.calibration import overhead_of
from headway.sim.calibration import host_s_of, scales_of
from headway.sim.replay import replay

SLOWER, BETWEEN_S, WOKEN_S = 1.7, 0.004, 0.02


@dataclass
class HostRequest:
    """The attributes of vLLM's request that a driver reads."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    is_prefill_chunk: bool = True


def logged_run(requests: int = 60, outputs: int = 4) -> list[dict[str, Any]]:
    """Return the log of an engine whose steps take longer than the profile says, one request after the other."""
    events: list[dict[str, Any]] = []
    now, chance, table = 0.0, random.Random(5), small_machine()
    log = DriverLog(
        lambda kind, fields: events.append({"event": kind, **fields}),
        lambda: now,
        {"engine": "vllm", "version": "test"},
    )
    pool = ReservedKvPool(1000, 16_000, *log.watched(lambda: 1000, lambda name, tokens: -(-tokens // 16)), 16)
    policy = IterationPolicy(
        SchedulerConfig(policy="lars", medha=MedhaConfig(), t_target_s=0.05), CorrectedLatency(table, 1.0), pool
    )
    driver = RecordingDriver(policy, pool, log, 16)
    for number in range(requests):
        now += 1.0
        request = HostRequest(f"r{number}", chance.randrange(2000, 9000))
        driver.enter(
            Request(id=request.request_id, arrival_s=now, prompt_tokens=request.num_tokens, max_output_tokens=outputs),
            request,
        )
        now, made = now + WOKEN_S, 0
        while made < outputs:
            decodes = int(made > 0)
            plan = driver.plan(decodes, decodes, decodes * request.num_tokens, now, True)
            tokens = plan.quotas.get(request.request_id, 1)
            if not decodes:
                request.num_computed_tokens += tokens
                request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
            load = driver.scheduled(plan, {request.request_id: tokens})
            made += not request.is_prefill_chunk
            seconds = SLOWER * load_s(table, plan.load) if decodes else SLOWER * plan_s(table, load)
            now += seconds
            if made == outputs:
                log.finished([request.request_id])
            driver.observed(load, seconds)
            now += BETWEEN_S
        driver.ended(request.request_id)
    return events


def plan_s(table: Any, load: Any) -> float:
    """Return a load's time by the profile, whatever scales it was predicted with."""
    return float(table.rows_s(load.tokens) + load.chunk_s / (load.chunk_scale or 1.0))


def test_times_between_steps_and_after_idling_are_in_the_log() -> None:
    run = replay(logged_run())
    assert run.differences == []
    assert host_s_of(run) == overhead_of(run, ()).iteration_s == pytest.approx(BETWEEN_S)
    woken = [each for each in run.batches if each.woken_s is not None]
    assert len(woken) == 60
    assert all(each.woken_s == pytest.approx(WOKEN_S + each.elapsed_s) and not each.waited_s for each in woken)


def test_the_profile_is_corrected_by_all_steps_of_the_log() -> None:
    run = replay(logged_run())
    assert all(
        each.terms is not None and each.elapsed_s == pytest.approx(SLOWER * sum(each.terms)) for each in run.batches
    )
    # The profile as it was, whatever the policy had learned when it decided.
    assert all(each.elapsed_s == pytest.approx(SLOWER * each.profile_s) for each in run.batches)
    # Terms that rise together share what they rise by; their sum is exact, as above.
    assert scales_of(run) == pytest.approx([SLOWER] * 4, rel=0.12)


def test_what_a_log_does_not_measure_is_kept() -> None:
    before = ServingOverhead(request_s=0.09, idle_s=0.02, iteration_s=0.004)
    busy = ServingOverhead(iteration_s=0.005)
    assert busy.with_unmeasured_of(before) == ServingOverhead(request_s=0.09, idle_s=0.02, iteration_s=0.005)
    # That it takes no longer to wake the engine was measured too.
    assert busy.with_unmeasured_of(before, woken=20).idle_s == 0.0
