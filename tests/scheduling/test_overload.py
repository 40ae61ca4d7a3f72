"""Under overload: as many in time as under the best of the other orders, and refusals that are right."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.marks import quick_first
from tests.helpers.unit_latency import small_machine

from headway.core.errors import OverloadedError
from headway.core.request import Request, Slo, Span
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import BatchLoad
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.groups import make_scheduler
from headway.policy.iteration.queue import LONGEST_SPANS
from headway.policy.iteration.scheduler import LONGEST_RETRY_S, refuse_late
from headway.sim import InstanceSpec, simulate
from headway.sim.metrics import ttft_s
from headway.sim.workload import TraceRequest


@pytest.mark.parametrize("seed", quick_first(range(6), 2))
def test_the_ladder_is_in_time_about_as_often_as_the_best_other_order(seed: int) -> None:
    rng, requests, at = random.Random(seed), [], 0.0
    for _ in range(150):
        tokens = rng.choice((100, 400, 1500, 6000, 20_000))
        requests.append(TraceRequest(at, tokens, 4))
        at += rng.expovariate(1 / 0.4)

    def late(policy: str) -> int:
        spec = InstanceSpec(config=SchedulerConfig(policy=policy), latency=small_machine(), kv_tokens=400_000)
        records = simulate(spec, requests).records
        return sum((ttft_s(record) or 0.0) > max(1.0, record.prompt_tokens * 5e-4) for record in records)

    counts = {policy: late(policy) for policy in ("ladder", "fcfs", "edf", "srpt", "lars")}
    assert counts["fcfs"] > 5
    assert counts["ladder"] <= min(counts.values()) + 5, counts


@given(st.lists(st.integers(10, 3000), max_size=8), st.integers(10, 3000))
@settings(max_examples=40, deadline=None)
def test_a_request_that_asks_for_it_is_refused_just_when_it_would_be_late(ahead: list[int], tokens: int) -> None:
    """First come, first served and no decodes: the prediction is the sum of what is ahead."""
    scheduler = make_scheduler(SchedulerConfig(policy="fcfs"), small_machine(), [BlockManager(100_000, 16)])
    policy = IterationPolicy(SchedulerConfig(policy="fcfs"), small_machine(), BlockManager(100_000, 16))
    alone = policy.prefill_times.total_s

    for index, prompt in enumerate(ahead):
        scheduler.add(Span.whole(Request(id=str(index), arrival_s=0.0, prompt_tokens=prompt, max_output_tokens=2)), 0.0)
    expected_s = sum(map(alone, ahead)) + alone(tokens)

    def asked(ttft: float, refuse: bool = True) -> None:
        slo = Slo(ttft_s=ttft, refuse_late=refuse)
        request = Request(id="new", arrival_s=0.0, prompt_tokens=tokens, max_output_tokens=2, slo=slo)
        refuse_late(scheduler, request, 0.0)

    asked(expected_s * 1.01)
    asked(expected_s * 0.5, refuse=False)
    with pytest.raises(OverloadedError, match="later than") as refused:
        asked(expected_s * 0.5)
    assert 0 < refused.value.retry_after_s <= min(LONGEST_RETRY_S, expected_s)


def test_running_decodes_slow_the_prediction() -> None:
    policy = IterationPolicy(SchedulerConfig(policy="fcfs", t_target_s=0.02), small_machine(), BlockManager(1000, 16))
    request = Request(id="new", arrival_s=0.0, prompt_tokens=3000, max_output_tokens=2)
    alone_s = policy.predicted_ttft_s(request, BatchLoad(), 0.0)
    beside_s = policy.predicted_ttft_s(request, BatchLoad(200, 200, 50_000), 0.0)
    assert beside_s > 1.2 * alone_s


@pytest.mark.parametrize(("clients", "tokens"), quick_first([(16, 300), (30, 150)]))
def test_a_large_prompt_begins_though_a_closed_loop_of_short_ones_always_takes_the_kv(
    clients: int, tokens: int
) -> None:
    requests = [TraceRequest(5.0, 3000, 4, "large")]
    for client in range(clients):
        first = TraceRequest(client * 0.05, tokens + client, 60, "short", session=str(client), thread="a", think_s=0.0)
        requests += [replace(first, think_s=None), *[replace(first, waits=True)] * (4000 // clients)]
    requests.sort(key=lambda request: request.arrival_s)
    spec = InstanceSpec(config=SchedulerConfig(), latency=small_machine(), kv_tokens=4000)
    records = simulate(spec, requests).records
    large = next(record for record in records if record.klass == "large")
    # It is due after a second. Beside its spans: the time in which the answers end that hold KV.
    bound_s = LONGEST_SPANS + 4.0
    assert max(record.token_s[-1] for record in records) > 5.0 + 2 * bound_s
    assert (ttft_s(large) or 0.0) < bound_s
