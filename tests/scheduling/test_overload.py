"""When not all deadlines can be met: the fewest are late, none waits for ever, and shares of time are kept."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.random_worlds import random_world
from tests.helpers.unit_latency import Linear, small_machine

from headway.core.errors import OverloadedError
from headway.core.request import Request, Slo
from headway.core.span import Span
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import BatchLoad, LatencyModel, decode_load, load_s
from headway.policy.iteration.compute_share import LEAST, MOST, ComputeShare
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.grouped_scheduler import make_scheduler
from headway.policy.iteration.ordering import UrgencyLine
from headway.policy.iteration.predicted_ttft import LONGEST_RETRY_S, predicted_ttft_s, refuse_late
from headway.policy.iteration.prefill import PrefillState
from headway.policy.iteration.relegation import DueWork, fewest_late
from headway.sim import InstanceSpec, simulate
from headway.sim.metrics.definitions import ttft_s
from headway.sim.result import SimResult
from headway.sim.workload import TraceRequest

JOBS = st.lists(st.builds(DueWork, st.integers(-3, 20), st.integers(1, 8), st.just(0)), max_size=7)


def in_time(jobs: Sequence[DueWork]) -> bool:
    """Whether all jobs can be in time: if any order does it, that of the deadlines does."""
    done = itertools.accumulate(job.work_s for job in sorted(jobs, key=lambda job: job.due_s))
    return all(end <= job.due_s for end, job in zip(done, sorted(jobs, key=lambda job: job.due_s), strict=True))


def least_late(jobs: Sequence[DueWork]) -> int:
    """Return the number of late jobs of the best of all choices."""
    sizes = range(len(jobs), -1, -1)
    return len(jobs) - next(n for n in sizes if any(in_time(kept) for kept in itertools.combinations(jobs, n)))


@given(JOBS)
def test_the_fewest_jobs_are_late_and_all_others_in_time(jobs: list[DueWork]) -> None:
    late = fewest_late(jobs)
    assert in_time([job for index, job in enumerate(jobs) if index not in late])
    assert len(late) == least_late(jobs)


@given(JOBS, st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_others_are_in_time_whatever_the_priorities(jobs: list[DueWork], priorities: list[int]) -> None:
    jobs = [job._replace(priority=priority) for job, priority in zip(jobs, priorities, strict=False)]
    late = fewest_late(jobs)
    assert in_time([job for index, job in enumerate(jobs) if index not in late])
    assert late or least_late(jobs) == 0


def test_of_two_the_less_important_one_is_late_though_it_is_smaller() -> None:
    assert fewest_late([DueWork(3.0, 3.0, -1), DueWork(3.0, 1.0, 0)]) == {1}


ROW_S = 0.01
CHUNK = 5
PLAIN: dict[str, Any] = {
    "t_target_s": CHUNK * ROW_S,
    "newcomer_wait_s": 0.0,
    "min_chunk": 0,
    "stretch": 0.0,
    "least_gain": 0.0,
    "long_iterations": 0.0,
    "reserve_tokens": 0,
    "space_sharing": False,
}
SMALL = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 20)), min_size=1, max_size=6)


def late_prompts(world: Sequence[tuple[int, int]], **fields: Any) -> int:
    """Prefill prompts of (chunks, chunks until due), which all wait at time 0. Return how many are late."""
    policy = IterationPolicy(SchedulerConfig(**PLAIN, **fields), Linear(ROW_S), BlockManager(1000, 16))
    for index, (chunks, due) in enumerate(world):
        slo = Slo(ttft_s=due * CHUNK * ROW_S + 1e-6)
        policy.enter(Request(id=str(index), arrival_s=0.0, prompt_tokens=chunks * CHUNK, max_output_tokens=1, slo=slo))
    now, late = 0.0, 0
    while len(policy.queue):
        decision = policy.pick(decode_load(policy.latency, 0, 0), now)
        policy.began()
        now += load_s(policy.latency, decision.load)
        states = {state.request.id: state for state in policy.queue}
        for quota in decision.quotas:
            state = states[quota.request]
            policy.moved(quota.request, state.scheduled + quota.tokens)
            if state.remaining == 0:
                policy.ended(quota.request)
                late += now > state.deadline_s
    return late


@given(world=SMALL)
@settings(max_examples=150, deadline=None)
def test_as_few_prompts_are_late_as_by_the_best_of_all_choices(world: list[tuple[int, int]]) -> None:
    """In order of deadlines, which meets all of them wherever that is possible; LARS does not."""
    best = least_late([DueWork(due, chunks) for chunks, due in world])
    assert late_prompts(world, policy="edf", relegation=True, relegated_share=1e-9) == best


def simulated(requests: Sequence[TraceRequest], latency: LatencyModel | None = None, **fields: Any) -> SimResult:
    spec = InstanceSpec(config=SchedulerConfig(**fields), latency=latency or small_machine(), kv_tokens=100_000)
    return simulate(spec, list(requests))


@given(st.integers(0, 10**6), st.sampled_from(["lars", "edf", "srpt", "preflow"]))
@settings(max_examples=15, deadline=None)
def test_nothing_changes_while_all_deadlines_can_be_met(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    requests, at = [], 0.0
    for _ in range(30):
        at += rng.expovariate(20.0)
        requests.append(TraceRequest(at, rng.choice((20, 200, 2000)), rng.randint(1, 30)))
    fields = {"policy": policy, "deadline_base_s": 1e4}
    assert simulated(requests, **fields, relegation=True).records == simulated(requests, **fields).records


@given(st.sampled_from([0.1, 0.3]), st.integers(2_000, 6_000), st.floats(1.2, 1.6))
@settings(max_examples=6, deadline=None)
def test_a_prompt_that_is_given_up_waits_no_longer_than_its_share_says_whatever_comes(
    share: float, tokens: int, load: float
) -> None:
    latency = Linear(1e-4)
    short_s, long_s = 500e-4, tokens * 1e-4
    # Shorts that exceed what the machine can do, for longer than the bound: without a share the document never ends.
    bound_s = long_s / share + 1.0
    count = int(2 * bound_s * load / short_s)
    shorts = [TraceRequest(i * short_s / load, 500, 1) for i in range(count)]
    document = TraceRequest(0.0, tokens, 1, klass="document")

    def waited_s(**fields: Any) -> float:
        result = simulated(
            [document, *shorts], latency, policy="srpt", deadline_base_s=0.3, deadline_factor=1.5, **fields
        )
        return next(ttft_s(record) or float("inf") for record in result.records if record.klass == "document")

    assert waited_s(relegation=True, relegated_share=share) <= bound_s
    assert waited_s() > bound_s


@pytest.mark.parametrize("seed", range(60))
def test_relegation_and_shares_survive_aborts_losses_and_evictions(seed: int) -> None:
    world, rng = random_world(seed), random.Random(f"overload {seed}")
    config = replace(
        world.config,
        policy=rng.choice((world.config.policy, "preflow")),
        relegation=rng.random() < 0.7,
        prefill_share=rng.choice((1.0, 0.4, 0.0)),
        deadline_base_s=0.02,
    )
    if config.prefill_share < 1:
        # Turns are longer than that.
        config = replace(config, progress_every=10**6)
    replace(world, config=config).run()


@given(st.floats(0.1, 0.9), st.floats(0.01, 0.5), st.floats(0.01, 0.5))
def test_prefills_get_their_share_of_the_contended_time(share: float, prefill_s: float, decode_s: float) -> None:
    turns, spent, now = ComputeShare(share), {True: 0.0, False: 0.0}, 0.0
    for _ in range(400):
        prefills = turns.grants(4)
        seconds = prefill_s if prefills else decode_s
        now += seconds
        spent[prefills] += seconds
        turns.charge(prefills, True, seconds, now)
    # Never off by more than one turn of each class.
    assert abs(spent[True] - share * now) <= prefill_s + decode_s


def test_a_share_binds_only_while_both_could_run() -> None:
    turns = ComputeShare(0.4)
    assert turns.grants(0)
    assert not turns.grants(1)
    for step in range(5):
        turns.charge(False, False, 1.0, float(step))
    assert not turns.grants(1), "decodes that ran alone owe the prefills nothing"


@pytest.mark.parametrize(("waited_s", "bound"), [(1e3, MOST), (0.0, LEAST)])
def test_the_automatic_share_follows_the_pressure_within_its_bounds(waited_s: float, bound: float) -> None:
    turns, now, before = ComputeShare(0.0), 0.0, []
    for _ in range(400):
        now += 0.1
        turns.charge(False, True, 0.05, now - 0.05)
        turns.adjust(waited_s, 1.0, now)
        before.append(turns.share)
    assert all(abs(b - a) <= 0.1 * 0.05 + 1e-9 for a, b in itertools.pairwise(before)), "a slew of 0.05 a second"
    assert before[-1] == pytest.approx(bound, abs=0.01)


def test_decodes_get_their_share_beside_a_document() -> None:
    requests = [TraceRequest(0.0, 50, 400), TraceRequest(0.1, 60_000, 1)]

    def last_token_s(**fields: Any) -> float:
        result = simulated(requests, policy="fcfs", chunking="static:2048", **fields)
        return max(result.records[0].token_s)

    assert last_token_s(prefill_share=0.2) < last_token_s(prefill_share=0.6) < last_token_s()


@given(st.lists(st.integers(10, 3000), max_size=8), st.integers(10, 3000))
@settings(max_examples=40, deadline=None)
def test_a_request_that_asks_for_it_is_refused_just_when_it_would_be_late(ahead: list[int], tokens: int) -> None:
    """First come, first served and no decodes: the prediction is the sum of what is ahead."""
    scheduler = make_scheduler(SchedulerConfig(policy="fcfs"), small_machine(), [BlockManager(100_000, 16)])
    policy = IterationPolicy(SchedulerConfig(policy="fcfs"), small_machine(), BlockManager(100_000, 16))
    alone = policy.urgency.prefill_times.total_s

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
    policy = IterationPolicy(
        SchedulerConfig(policy="fcfs", t_target_s=0.02, newcomer_wait_s=0.0), small_machine(), BlockManager(1000, 16)
    )
    request = Request(id="new", arrival_s=0.0, prompt_tokens=3000, max_output_tokens=2)
    alone_s = policy.predicted_ttft_s(request, BatchLoad(), 0.0)
    beside_s = policy.predicted_ttft_s(request, BatchLoad(200, 200, 50_000), 0.0)
    assert beside_s > 1.2 * alone_s


@pytest.mark.parametrize(
    ("line", "priority", "expected_s"),
    [
        (UrgencyLine(5.0, 1.0), 0, 5.0 + 2.0),  # the newcomer's urgency reaches the document's after 5 s
        (UrgencyLine(5.0, 2.0), 0, 200.0 + 2.0),  # parallel lines never meet
        (UrgencyLine(5.0, 1.0), -1, 200.0 + 2.0),  # nor do those of different priorities
        (UrgencyLine(11.0, 1.0), 0, 2.0),  # less urgent already
    ],
)
def test_what_is_ahead_counts_until_the_newcomer_is_more_urgent(
    line: UrgencyLine, priority: int, expected_s: float
) -> None:
    def waiting(name: str, work_s: float, priority: int = 0) -> PrefillState:
        request = Request(id=name, arrival_s=0.0, prompt_tokens=10, max_output_tokens=1, priority=priority)
        state = PrefillState(request, 0)
        state.work_s = state.total_s = work_s
        return state

    document, newcomer = waiting("document", 100.0, priority), waiting("newcomer", 1.0)
    found = predicted_ttft_s(newcomer, UrgencyLine(10.0, 2.0), [(document, line)], 0.5, 0.0)
    assert found == pytest.approx(expected_s)
