"""Time budget of an iteration: what running decodes and a possible newcomer allow."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.latency_models import table

from headway.core.request import Request, Slo
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import BatchLoad, LatencyModel, decode_load, load_s, solve_tokens
from headway.perf.latency.corrected import CorrectedLatency
from headway.policy.iteration.budget import (
    ALONE_EFFICIENCY,
    DECODE_EFFICIENCY,
    LEAST_AIM_S,
    LONGEST_AIM_S,
    LONGEST_WAIT_S,
    NEWCOMER_EFFICIENCY,
    ArrivalGaps,
    EfficientChunks,
    reference_aim_s,
)
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.medha import LONG, MedhaConfig
from headway.sim import InstanceSpec, simulate
from headway.sim.workload import TraceRequest


def machine(step_s: float = 0.02, row_s: float = 4e-4, kv_s: float = 1e-8) -> LatencyModel:
    """Return a processor whose iteration takes `step_s` for one row and `row_s` for each further one."""
    chunks = [(0, 0.0, 0.0), (8192, 8192 * 8192 * kv_s / 2, 8192 * kv_s)]
    return table([(0, step_s), (8192, step_s + 8192 * row_s)], chunks, (0.0, 1e-4, kv_s))


SLOW = machine()
FAST = machine(1e-3, 1e-5, 1e-10)


def policy_of(latency: LatencyModel = SLOW, **fields: object) -> IterationPolicy:
    config = SchedulerConfig(**fields)
    return IterationPolicy(config, latency, BlockManager(4_000_000, 16))


def enter(policy: IterationPolicy, name: str, tokens: int, at_s: float = 0.0, **fields: object) -> None:
    policy.enter(Request(id=name, arrival_s=at_s, prompt_tokens=tokens, max_output_tokens=1000, **fields))


def run(policy: IterationPolicy, name: str, tokens: int, now: float = 0.0) -> tuple[list[int], float]:
    """Prefill a lone request. Return its chunks and the time of its last iteration's end."""
    chunks, done = [], 0
    while done < tokens:
        decision = policy.pick(decode_load(policy.latency, 0, 0), now)
        chunks.append(next(iter(decision.quotas.values())))
        done += chunks[-1]
        policy.moved(name, done)
        policy.began()
        now += load_s(policy.latency, decision.load)
    policy.decoding(name)
    return chunks, now


def test_a_lone_chat_runs_in_one_iteration() -> None:
    policy = policy_of()
    enter(policy, "chat", 200)
    assert run(policy, "chat", 200)[0] == [200]


def test_a_lone_document_takes_efficient_chunks_on_a_slow_machine() -> None:
    def alone_s(**fields: object) -> float:
        policy = policy_of(**fields)
        enter(policy, "document", 16_384)
        return run(policy, "document", 16_384)[1]

    # Within an eighth of what the best chunks give, of about a second; iterations of 55 ms cost it a third.
    best_s = 16_384 / max(n / (SLOW.rows_s(n) + SLOW.attention_s(8192 - n // 2, n)) for n in range(64, 2300, 64))
    assert alone_s() <= 1.25 * best_s
    assert alone_s(policy="fcfs", medha=MedhaConfig(), t_target_s=LEAST_AIM_S) > 1.3 * best_s


def test_default_aim_is_short_on_a_fast_machine_and_bounded_on_a_slow_one() -> None:
    aims = [reference_aim_s(SchedulerConfig(), latency) for latency in (FAST, SLOW, machine(1.0, 1e-2))]
    assert aims[0] == LEAST_AIM_S < aims[1] < aims[2] == LONGEST_AIM_S
    assert reference_aim_s(SchedulerConfig(t_target_s=0.01), SLOW) == 0.01


@settings(max_examples=60, deadline=None)
@given(
    step_s=st.floats(1e-4, 0.1),
    row_s=st.floats(1e-6, 1e-3),
    kv_s=st.floats(1e-10, 1e-7),
    context=st.integers(0, 200_000),
    shares=st.tuples(st.floats(0.1, 1.0), st.floats(0.1, 1.0)),
)
def test_efficient_iterations_grow_with_the_share_asked_for(
    step_s: float, row_s: float, kv_s: float, context: int, shares: tuple[float, float]
) -> None:
    chunks = EfficientChunks(machine(step_s, row_s, kv_s), 8192)
    low, high = (chunks.aim_s(context, share) for share in sorted(shares))
    assert LEAST_AIM_S <= low <= high <= LONGEST_AIM_S


def test_decodes_ahead_of_their_due_times_lend_time_and_late_ones_do_not() -> None:
    policy = policy_of()
    enter(policy, "chat", 100)
    _, now = run(policy, "chat", 100)
    chunks = EfficientChunks(SLOW, 8192)
    assert policy.budget_s(now) == chunks.aim_s(0, NEWCOMER_EFFICIENCY)
    # The first token was due after 1 s; each further one is due an aim later.
    aim_s = chunks.aim_s(0, DECODE_EFFICIENCY)
    assert policy.budget_s(1.0) == pytest.approx(aim_s)
    assert policy.budget_s(100.0) == pytest.approx(aim_s)
    policy.began(10)
    assert policy.budget_s(1.0) > aim_s
    assert policy.budget_s(1.0 + 10 * aim_s) == pytest.approx(aim_s)


def test_a_configured_target_is_a_hard_bound_beside_decodes_only() -> None:
    policy = policy_of(t_target_s=0.08)
    enter(policy, "chat", 100)
    assert policy.budget_s(0.0) > 0.08
    run(policy, "chat", 100)
    assert policy.budget_s(0.0) == 0.08
    policy.ended("chat")
    assert policy.budget_s(0.0) > 0.08


def test_a_target_beyond_what_a_prompt_gains_by_makes_no_one_wait() -> None:
    policy, literal = (policy_of(t_target_s=30.0, policy="lars", medha=medha) for medha in (None, MedhaConfig()))
    enter(policy, "chat", 100)
    sizes = range(8, 8192, 8)
    best = max(size / (SLOW.rows_s(size) + SLOW.attention_s(8192, size)) for size in sizes)
    run(policy, "chat", 100)
    budget_s = policy.budget_s(0.0)
    assert solve_tokens(SLOW, BatchLoad(), 8192, 8192, budget_s)[0] / budget_s >= 0.97 * best
    assert budget_s < 1.0
    # A guess cannot say what is useful, but what counts as long does not depend on the target either.
    rough = policy_of(CorrectedLatency(SLOW, 0.3), t_target_s=30.0)
    for other in (literal, rough):
        enter(other, "chat", 100)
        run(other, "chat", 100)
        assert other.budget_s(0.0) == 30.0
    assert rough.budget_s(0.0) == 30.0


@settings(max_examples=80, deadline=None)
@given(
    slos=st.lists(
        st.tuples(st.one_of(st.none(), st.floats(0.07, 3.0)), st.one_of(st.none(), st.floats(0.07, 0.4))),
        min_size=1,
        max_size=6,
    ),
    target_s=st.one_of(st.none(), st.floats(0.07, 0.3)),
    now=st.floats(0.0, 30.0),
    iterations=st.integers(0, 40),
)
def test_budget_never_exceeds_what_a_running_decode_allows(
    slos: list[tuple[float | None, float | None]], target_s: float | None, now: float, iterations: int
) -> None:
    policy = policy_of(t_target_s=target_s)
    aim_s = reference_aim_s(policy.config, SLOW)
    due = {}
    for i, (ttft_s, tbt_s) in enumerate(slos):
        name = f"r{i}"
        state = policy.enter(
            Request(id=name, arrival_s=0.0, prompt_tokens=2, max_output_tokens=99, slo=Slo(ttft_s, tbt_s))
        )
        policy.moved(name, 2)
        state.generated = 1
        policy.decoding(name)
        due[name] = (tbt_s, state.deadline_s + aim_s)
    policy.began(iterations)
    budget_s = policy.budget_s(now)
    for tbt_s, first_due_s in due.values():
        # Each iteration so far has given each decode a token.
        allowed_s = tbt_s if tbt_s is not None else max(aim_s, first_due_s + aim_s * iterations - now)
        assert budget_s <= allowed_s + 1e-9
    assert target_s is None or budget_s <= target_s
    for name in due:
        policy.ended(name)
    assert policy.targets.members == {}
    assert policy.budget_s(now) == policy_of(t_target_s=target_s).budget_s(0.0) or now > 0


def test_ended_decodes_leave_the_due_times() -> None:
    """A decode that is due early and stays keeps the entries of later ones from reaching the heap's top."""
    policy = policy_of()
    for i in range(2000):
        name = f"r{i}"
        enter(policy, name, 2)
        policy.moved(name, 2)
        policy.decoding(name)
        if i:
            policy.ended(name)
    assert sum(len(heap) for heap in policy.targets._due.values()) < 100


def test_the_budget_follows_a_model_that_has_learned() -> None:
    budgets = []
    for first in (FAST, SLOW):
        policy = policy_of(first)
        enter(policy, "chat", 200)
        _, now = run(policy, "chat", 200)
        policy.budget_s(now)
        # The model that learns is one object, whose times change.
        policy.budget.chunks._latency = policy.budget._latency = SLOW
        policy.budget.chunks.clear()
        budgets.append(policy.budget_s(1000.0))
    assert budgets[0] == budgets[1] > LEAST_AIM_S


def test_newcomers_wait_longer_only_where_arrivals_are_rare() -> None:
    gaps = ArrivalGaps()
    assert gaps.expected_s(5.0) == 0.0
    gaps.arrived(0.0, idle=True)
    assert gaps.expected_s(7.0) == 7.0
    for at in (8.0, 9.0, 10.0):
        gaps.arrived(at, idle=False)
    assert gaps.expected_s(10.5) == 1.0
    assert gaps.expected_s(110.0) == 20.0
    # One arrival ends the quiet time, however long it was.
    gaps.arrived(110.0, idle=False)
    assert gaps.expected_s(110.0) == 1.0


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.01, 5.0)), min_size=2, max_size=30))
def test_one_request_after_another_is_no_newcomer(turns: list[tuple[float, float]]) -> None:
    """Each is alone: (idle seconds before it, its seconds)."""
    gaps, now, busy_s = ArrivalGaps(), 0.0, 0.0
    for idle_s, seconds in turns:
        now += idle_s
        gaps.arrived(now, idle=True)
        now, busy_s = now + seconds, busy_s + seconds
        gaps.worked(seconds)
        assert gaps.expected_s(now) == pytest.approx(busy_s)
    # Once some find others there, more are expected as soon.
    gaps.arrived(now, idle=False)
    gaps.arrived(now + 0.5, idle=False)
    assert gaps.expected_s(now + 0.5) == pytest.approx(min(busy_s, 0.5))


def test_lone_iterations_grow_with_quiet_time_up_to_a_bound() -> None:
    policy = policy_of(SLOW)
    enter(policy, "document", 100_000)
    budgets = [policy.budget_s(now) for now in (0.0, 1.0, 5.0, 10.0, 1e6)]
    chunks = EfficientChunks(SLOW, policy.config.max_num_batched_tokens)
    assert budgets[0] == chunks.aim_s(0, NEWCOMER_EFFICIENCY)
    assert all(a <= b for a, b in itertools.pairwise(budgets))
    # Longer ones would gain the document less than 2%.
    assert budgets[0] < budgets[-1] == chunks.useful_s(0, ALONE_EFFICIENCY) < LONGEST_WAIT_S
    # Where the best chunks take longer, or a guess cannot say which those are, a newcomer may wait as long at most.
    for latency in (machine(0.25), CorrectedLatency(SLOW, 0.3)):
        slower = policy_of(latency)
        enter(slower, "document", 100_000)
        assert slower.budget_s(1e6) == LONGEST_WAIT_S
    fixed = policy_of(SLOW, policy="lars", medha=MedhaConfig(), t_target_s=0.7)
    enter(fixed, "document", 100_000)
    assert {fixed.budget_s(now) for now in (0.0, 1e6)} == {0.7}


def test_a_prompts_cached_part_does_not_make_it_long() -> None:
    policy = policy_of(policy="lars")
    enter(policy, "follow-up", 60_000, cached_tokens=59_900)
    enter(policy, "document", 60_000)
    states = {state.request.id: state for state in policy.order(0.0)}
    follow_up, document = states["follow-up"], states["document"]
    assert (follow_up.medha_size == LONG, document.medha_size == LONG) == (False, True)
    assert follow_up.total_s < document.total_s / 50


def test_a_cached_part_that_is_lost_is_work_again() -> None:
    policy = policy_of(policy="lars")
    request = Request(id="follow-up", arrival_s=0.0, prompt_tokens=60_000, max_output_tokens=9, cached_tokens=59_900)
    state = policy.enter(request, holds_kv=True)
    assert state.medha_size != LONG
    policy.lost("follow-up", 60_000)
    assert (state.medha_size, state.remaining, len(policy.queue)) == (LONG, 60_000, 1)
    policy.ended("follow-up")
    assert len(policy.queue) == 0


def test_short_work_over_a_cached_prompt_is_not_held_behind_a_document() -> None:
    """100 new tokens over a cached conversation get their tokens in the first iteration beside a document."""
    policy = policy_of()
    enter(policy, "document", 60_000)
    enter(policy, "follow-up", 60_000, cached_tokens=59_900)
    assert policy.pick(BatchLoad(), 0.0).quotas["follow-up"] == 100


def test_a_document_among_chats_is_slowed_little_on_a_slow_machine() -> None:
    """One 200/16 chat a second beside a document of 16K tokens; 55 ms iterations cost it a multiple."""
    chats = [TraceRequest(0.4 + i, 200, 16, "chat") for i in range(12)]

    def served(requests: list[TraceRequest], **fields: object) -> tuple[float, float]:
        config = SchedulerConfig(**fields)
        records = simulate(InstanceSpec(config=config, latency=SLOW, kv_tokens=100_000), requests).records
        first = {
            klass: max(r.token_s[0] - r.arrival_s for r in records if r.klass == klass) for klass in ("doc", "chat")
        }
        return first["doc"], first["chat"]

    document = TraceRequest(0.0, 16_384, 1, "doc")
    alone_s, _ = served([document, TraceRequest(60.0, 200, 16, "chat")])
    doc_s, chat_s = served([document, *chats])
    fixed_s, _ = served([document, *chats], t_target_s=0.055)
    # Prefill of a chat is 0.1 s: a tenth of all time is theirs at least.
    assert doc_s < 1.35 * alone_s
    assert doc_s < 0.9 * fixed_s
    assert chat_s < LONGEST_AIM_S + 0.15
