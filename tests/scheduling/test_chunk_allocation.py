"""Contents of an iteration: the budget, yielded time, the one long request, and guaranteed progress."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.helpers.unit_latency import Linear, small_machine

from headway.perf.latency.base import BatchLoad, decode_load, load_s
from headway.perf.latency.table_latency import TableLatency, TableSource
from headway.policy.iteration.chunk_allocation import (
    ChunkAllocation,
    PackCandidate,
    PackRules,
    even_rows,
    pack,
    rules_of,
)
from headway.policy.iteration.chunking_strategies import (
    AdaptiveChunks,
    PrefillDemand,
    StaticBudget,
    WholePrompt,
    make_chunking,
)
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.prefill import LONG, ONE_ITERATION, SEVERAL_ITERATIONS

RULES = PackRules(t_target_s=0.02, max_tokens=8192, min_chunk=8, progress_every=8, rho_min=0.0, rho_max=0.6)
NONE = LONG + 1
MILLISECOND = Linear(row_s=0.001)
STEEP = TableLatency(
    TableSource(
        fingerprint="",
        provenance="10 us a row; a row over 100,000 tokens takes 10 ms",
        tokens=((0, 1e-3), (1000, 11e-3)),
        chunks=((0, 0.0, 0.0), (1000, 0.0, 1e-4)),
        decode=(0.0, 0.0, 0.0),
    )
)
CANDIDATES = st.lists(
    st.builds(
        PackCandidate,
        st.uuids().map(str),
        st.integers(0, 5_000),
        st.integers(1, 3_000),
        st.sampled_from([ONE_ITERATION, SEVERAL_ITERATIONS, LONG]),
        st.floats(-5, 50),
        st.integers(0, 20),
        reserved_s=st.sampled_from([0.0, 0.0, 0.004]),
        exchange_s_per_row=st.sampled_from([0.0, 0.0, 1e-5]),
    ),
    max_size=12,
)


def long(slack: float, remaining: int = 1000, stalled: int = 0) -> PackCandidate:
    return PackCandidate("long", 0, remaining, LONG, slack, stalled)


def short(name: str, remaining: int, stalled: int = 0) -> PackCandidate:
    return PackCandidate(name, 0, remaining, ONE_ITERATION, 50.0, stalled)


@given(
    CANDIDATES,
    st.integers(0, 200),
    st.integers(SEVERAL_ITERATIONS, NONE),
    st.sampled_from([1, 8, 32]),
    st.sampled_from([64, 500, 8192]),
    st.booleans(),
)
def test_batch_keeps_time_and_tokens_unless_it_is_one_progress_chunk(
    candidates: list[PackCandidate], decodes: int, yields_from: int, min_chunk: int, max_tokens: int, even: bool
) -> None:
    model = small_machine()
    before = BatchLoad(decodes, decodes, decodes * 1_500)
    rules = replace(RULES, min_chunk=min_chunk, max_tokens=max_tokens, even_rows=even)
    quotas, load = pack(before, candidates, yields_from, rules, AdaptiveChunks(), model)
    by_name = {candidate.request: candidate for candidate in candidates}
    assert load.tokens == decodes + sum(quota.tokens for quota in quotas)
    assert all(0 < quota.tokens <= by_name[quota.request].remaining for quota in quotas)
    assert sum(by_name[quota.request].size == LONG for quota in quotas) <= 1
    assert [q.request for q in quotas] == [c.request for c in candidates if c.request in {q.request for q in quotas}]
    if quotas:
        assert load.tokens <= max_tokens
        progress = len(quotas) == 1 and quotas[0].tokens <= min_chunk
        assert progress or load_s(model, load) <= rules.t_target_s * (1 + 1e-9)
    if candidates and not decodes:
        assert quotas, "with nothing else to do somebody goes on"
    if even and len(quotas) == 1 and quotas[0].tokens < by_name[quotas[0].request].remaining:
        assert load.tokens == even_rows(load.tokens) or quotas[0].tokens < 2 * min_chunk + load.tokens // 16


@given(st.integers(0, 20_000))
def test_even_sizes_recur_and_lose_little(rows: int) -> None:
    even = even_rows(rows)
    assert rows - rows / 16 <= even <= rows
    assert even_rows(even) == even
    assert len({even_rows(r) for r in range(rows, 2 * rows)}) <= 17


def test_a_long_request_with_20_percent_slack_gets_16_of_20_ms_and_a_short_one_the_rest() -> None:
    rules = replace(RULES, min_chunk=4)
    quotas, load = pack(BatchLoad(), [long(0.2), short("s", 100)], LONG, rules, AdaptiveChunks(), MILLISECOND)
    assert quotas == [ChunkAllocation("long", 16), ChunkAllocation("s", 4)]
    assert load_s(MILLISECOND, load) == pytest.approx(0.02)


def test_paper_mode_departs_from_algorithms_1_and_2_in_the_two_places_that_the_docs_name() -> None:
    """As printed, a short prompt with so much slack would yield too (12 of 20 ms), and an iteration stay empty."""
    config = SchedulerConfig.named("paper")
    rules, chunks = rules_of(config, 0.02), AdaptiveChunks(config.subtract_times)
    quotas, _ = pack(BatchLoad(), [short("s", 100)], LONG, rules, chunks, MILLISECOND)
    assert quotas == [ChunkAllocation("s", 20)], "a short prompt yields nothing"
    quotas, _ = pack(BatchLoad(), [long(50.0)], LONG, rules, chunks, MILLISECOND)
    assert quotas == [ChunkAllocation("long", 12)], "a long one yields"
    tight = rules_of(config, 0.0005)
    quotas, _ = pack(BatchLoad(), [short("a", 9), short("b", 9)], LONG, tight, chunks, MILLISECOND)
    assert quotas == [ChunkAllocation("a", 1)], "one pass, and one token"
    assert pack(BatchLoad(1, 1, 9), [short("a", 9)], LONG, tight, chunks, MILLISECOND)[0] == []


@pytest.mark.parametrize(
    ("slack", "tokens"), [(-3.0, 20), (0.0, 20), (0.28, 14), (0.6, 8), (50.0, 8)], ids=lambda value: str(value)
)
def test_yielded_share_is_the_slack_clamped_to_its_bounds(slack: float, tokens: int) -> None:
    assert pack(BatchLoad(), [long(slack)], LONG, RULES, AdaptiveChunks(), MILLISECOND)[0] == [
        ChunkAllocation("long", tokens)
    ]


def test_a_late_long_request_yields_at_least_rho_min() -> None:
    rules = replace(RULES, rho_min=0.2)
    assert pack(BatchLoad(), [long(-9.0)], LONG, rules, AdaptiveChunks(), MILLISECOND)[0] == [
        ChunkAllocation("long", 16)
    ]


def test_what_takes_several_iterations_yields_from_its_size_on_and_is_stretched_only_where_it_does_not() -> None:
    rules = replace(RULES, stretch=0.1)
    turn = PackCandidate("turn", 0, 22, SEVERAL_ITERATIONS, 0.5)
    for yields_from, tokens in ((SEVERAL_ITERATIONS, 10), (LONG, 22), (NONE, 22)):
        quotas, _ = pack(BatchLoad(), [turn, short("s", 3)], yields_from, rules, AdaptiveChunks(), MILLISECOND)
        assert quotas[0] == ChunkAllocation("turn", tokens)
        assert len(quotas) == 1 + (tokens == 10)
    for yields_from, tokens in ((SEVERAL_ITERATIONS, 10), (LONG, 10), (NONE, 20)):
        quotas, _ = pack(BatchLoad(), [long(0.5)], yields_from, rules, AdaptiveChunks(), MILLISECOND)
        assert quotas == [ChunkAllocation("long", tokens)]
    quotas, _ = pack(
        BatchLoad(), [structs.replace(turn, yields=False)], SEVERAL_ITERATIONS, rules, AdaptiveChunks(), MILLISECOND
    )
    assert quotas == [ChunkAllocation("turn", 22)]


def test_long_request_yields_nothing_to_shorts_of_a_lower_priority() -> None:
    prior = structs.replace(long(0.5), yields=False)
    candidates = [prior, short("s", 10)]
    assert pack(BatchLoad(), candidates, LONG, RULES, AdaptiveChunks(), MILLISECOND)[0] == [ChunkAllocation("long", 20)]


def test_short_requests_never_yield() -> None:
    assert pack(BatchLoad(), [short("s", 100)], LONG, RULES, AdaptiveChunks(), MILLISECOND)[0] == [
        ChunkAllocation("s", 20)
    ]


def test_a_second_long_request_is_passed_over_and_later_shorts_are_not() -> None:
    second = PackCandidate("long 2", 0, 500, LONG, 0.0)
    waiting = [long(0.5), second, short("s", 5)]
    quotas, _ = pack(BatchLoad(), waiting, LONG, replace(RULES, min_chunk=1), AdaptiveChunks(), MILLISECOND)
    assert quotas == [ChunkAllocation("long", 10), ChunkAllocation("s", 5)]


def test_first_request_gets_min_chunk_every_few_iterations_if_decodes_exceed_the_budget() -> None:
    busy = BatchLoad(30, 30, 30_000)
    for stalled, expected in ((0, []), (7, []), (8, [ChunkAllocation("a", 8)]), (20, [ChunkAllocation("a", 8)])):
        waiting = [short("a", 100, stalled), short("b", 100, 99)]
        assert pack(busy, waiting, LONG, RULES, AdaptiveChunks(), MILLISECOND)[0] == expected


def test_progress_chunk_is_bounded_by_remaining_tokens_and_token_limit() -> None:
    busy = BatchLoad(30, 30, 30_000)
    assert pack(busy, [short("a", 3, 8)], LONG, RULES, AdaptiveChunks(), MILLISECOND)[0] == [ChunkAllocation("a", 3)]
    tight = replace(RULES, max_tokens=32)
    assert pack(busy, [short("a", 99, 8)], LONG, tight, AdaptiveChunks(), MILLISECOND)[0] == [ChunkAllocation("a", 2)]


@pytest.mark.parametrize(("min_chunk", "tokens"), [(0, 1), (8, 8)])
def test_request_advances_even_if_no_chunk_fits_the_budget(min_chunk: int, tokens: int) -> None:
    """Paper mode has no least chunk, and would wait for ever."""
    slow = Linear(row_s=0.001, fixed_s=0.05)
    quotas, _ = pack(BatchLoad(), [short("a", 100)], LONG, replace(RULES, min_chunk=min_chunk), AdaptiveChunks(), slow)
    assert quotas == [ChunkAllocation("a", tokens)]


def test_request_without_kv_is_skipped_and_the_next_counts_as_first() -> None:
    slow = Linear(row_s=0.001, fixed_s=0.05)
    asked: list[str] = []

    def admit(name: str) -> bool:
        asked.append(name)
        return name == "b"

    waiting = [short("a", 100), short("b", 100), short("c", 100)]
    assert pack(BatchLoad(), waiting, LONG, RULES, AdaptiveChunks(), slow, admit)[0] == [ChunkAllocation("b", 8)]
    assert asked == ["a", "b"]


def test_candidates_are_not_looked_at_once_nothing_more_can_fit() -> None:
    seen: list[str] = []

    def candidates():  # type: ignore[no-untyped-def]
        for i in range(1000):
            seen.append(f"s{i}")
            yield short(f"s{i}", 10)

    quotas, _ = pack(BatchLoad(), candidates(), LONG, RULES, AdaptiveChunks(), MILLISECOND)
    assert [quota.request for quota in quotas] == ["s0", "s1"]
    assert len(seen) <= 4


def test_whole_takes_all_of_a_prompt_alone_and_several_only_up_to_the_limit() -> None:
    rules = replace(RULES, max_tokens=100)
    whole = WholePrompt()
    assert pack(BatchLoad(), [short("a", 5000), short("b", 5)], LONG, rules, whole, MILLISECOND)[0] == [
        ChunkAllocation("a", 5000)
    ]
    several = [short("a", 60), short("b", 50), short("c", 40)]
    assert pack(BatchLoad(), several, LONG, rules, whole, MILLISECOND)[0] == [
        ChunkAllocation("a", 60),
        ChunkAllocation("c", 40),
    ]
    busy = BatchLoad(64, 64, 64_000)
    assert pack(busy, [short("a", 5000)], LONG, rules, whole, MILLISECOND)[0] == [ChunkAllocation("a", 5000)]


def test_static_is_a_budget_of_tokens_decodes_included() -> None:
    static = StaticBudget(512)
    waiting = [short("a", 300), short("b", 300)]
    assert pack(BatchLoad(), waiting, LONG, RULES, static, MILLISECOND)[0] == [
        ChunkAllocation("a", 300),
        ChunkAllocation("b", 212),
    ]
    busy = BatchLoad(500, 500, 500)
    assert pack(busy, waiting, LONG, RULES, static, MILLISECOND)[0] == [ChunkAllocation("a", 12)]
    assert pack(BatchLoad(512, 512, 512), waiting, LONG, RULES, static, MILLISECOND)[0] == []


def test_printed_algorithm_2_charges_the_fixed_cost_twice_and_default_mode_once() -> None:
    model = Linear(row_s=0.001, fixed_s=0.005)
    load = BatchLoad(5, 5, 0)  # 10 ms of the 20
    ask = PrefillDemand(0, 100, 100)
    assert make_chunking("adaptive", subtract=True).quota(ask, load, 0.02, model)[0] == 5
    assert make_chunking("adaptive", subtract=False).quota(ask, load, 0.02, model)[0] == 10


@pytest.mark.parametrize("spec", ["adaptive", "whole", "static:7"])
def test_chunking_strategy_has_the_name_of_its_spec(spec: str) -> None:
    assert make_chunking(spec).name == spec


def test_yielding_long_request_gets_no_min_chunk_that_would_crowd_out_a_short() -> None:
    long = PackCandidate("long", 100_000, 50_000, LONG, 5.0)  # one token of it takes 10 ms
    short = PackCandidate("short", 0, 500, ONE_ITERATION, 30.0)
    quotas, load = pack(BatchLoad(), [long, short], LONG, RULES, make_chunking("adaptive"), STEEP)
    assert [quota.request for quota in quotas] == ["short"]
    assert load_s(STEEP, load) <= RULES.t_target_s


def test_unused_yielded_time_goes_back_to_the_long_request() -> None:
    long = PackCandidate("long", 100_000, 50_000, LONG, 5.0)
    short = PackCandidate("short", 0, 500, ONE_ITERATION, 30.0)
    quotas, _ = pack(
        BatchLoad(), [long, short], LONG, RULES, make_chunking("adaptive"), STEEP, lambda name: name == "long"
    )
    assert quotas == [ChunkAllocation("long", RULES.min_chunk)]


@pytest.mark.parametrize(("prompt", "given"), [(20, 20), (21, 21), (22, 22), (23, 20)])
def test_an_iteration_stretches_to_complete_a_short_prompt_and_no_further(prompt: int, given: int) -> None:
    rules = replace(RULES, stretch=0.1)
    quotas, _ = pack(
        BatchLoad(), [PackCandidate("a", 0, prompt, ONE_ITERATION, 1.0)], LONG, rules, AdaptiveChunks(), MILLISECOND
    )
    assert quotas == [ChunkAllocation("a", given)]


@pytest.mark.parametrize(
    ("past", "decodes", "given"), [(99, 0, 20), (100, 0, 50), (100, 1, 19)], ids=["short prefix", "long", "decodes"]
)
def test_the_rest_of_a_long_cached_prompt_is_one_chunk_where_nothing_decodes(
    past: int, decodes: int, given: int
) -> None:
    rules = replace(RULES, stretch=0.1, cached_rest_s=0.05, cached_from=100)
    hit, too_long = (PackCandidate("a", past, rest, ONE_ITERATION, 1.0) for rest in (50, 60))
    load = decode_load(MILLISECOND, decodes, 0)
    quotas, _ = pack(load, [hit], NONE, rules, AdaptiveChunks(), MILLISECOND)
    assert quotas == [ChunkAllocation("a", given)]
    quotas, _ = pack(load, [too_long], NONE, rules, AdaptiveChunks(), MILLISECOND)
    assert quotas == [ChunkAllocation("a", 20 - decodes)]


@pytest.mark.parametrize("config", [{"t_target_s": 0.05}, {"newcomer_wait_s": 0.1}, {"stages": 2}])
def test_configured_times_and_stages_leave_the_rest_of_a_cached_prompt_in_chunks(config: dict[str, float]) -> None:
    assert rules_of(SchedulerConfig(), 0.05).cached_rest_s > 0.05
    assert rules_of(SchedulerConfig(**config), 0.05).cached_rest_s == 0  # type: ignore[arg-type]


def test_nothing_stretches_for_a_long_prompt() -> None:
    rules = replace(RULES, stretch=0.1)
    quotas, _ = pack(BatchLoad(), [PackCandidate("a", 0, 21, LONG, 1.0)], NONE, rules, AdaptiveChunks(), MILLISECOND)
    assert quotas == [ChunkAllocation("a", 20)]
