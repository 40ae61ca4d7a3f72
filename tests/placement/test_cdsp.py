"""Tetris's planner: its plans equal those of the literal algorithms, and every plan has the paper's properties."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import ConfigError
from headway.perf.latency import eq1
from headway.perf.latency.eq1 import Eq1Coefficients, Eq1Latency
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.cdsp import CdspPlanner, ChunkAllocation, native_search
from headway_research.tetris.literal import LiteralPlanner

TABLE = eq1.extended(eq1.tetris_table1(), 128)
STATE_COUNT = 1_500
HAVE_NATIVE = native_search([[0]], [(1, TABLE.sizes[1])], True) is not None


class PlannerState:
    """A pool, a request, and a rate."""

    def __init__(self, rng: random.Random, most: int = 32) -> None:
        count = rng.choice([n for n in (4, 8, 12, 16, 32, 64) if n <= most])
        per_node = rng.choice((8, 8, 8, 4, 3))
        self.nodes = [i // per_node for i in range(count)]
        self.sizes = [1 << k for k in range(7) if 1 << k <= count]
        self.rate = rng.choice((0.0, 0.05, 0.3, 0.6))
        idle = rng.choice((0.0, 0.3, 1.0))
        self.queue_s = [0.0 if rng.random() < idle else rng.uniform(0.0, rng.choice((0.5, 5.0))) for _ in range(count)]
        self.tokens = rng.randint(1, 190_000)
        self.cached = rng.choice((0, 0, 5_000))

    def literal(self, latency: Eq1Latency = TABLE) -> ChunkAllocation:
        planner = LiteralPlanner(latency, self.sizes, self.nodes, self.rate)
        return planner.plan(self.tokens, dict(enumerate(self.queue_s)), self.cached)

    def fast(self, native: bool, latency: Eq1Latency = TABLE) -> ChunkAllocation:
        planner = CdspPlanner(latency, self.sizes, self.nodes, native=native)
        return planner.plan(self.tokens, self.queue_s, self.rate, self.cached)


SEARCHES = [
    pytest.param(False, id="python"),
    pytest.param(True, id="compiled", marks=pytest.mark.skipif(not HAVE_NATIVE, reason="no C++ compiler")),
]


@pytest.mark.parametrize("native", SEARCHES)
def test_fast_plans_equal_literal_plans(native: bool) -> None:
    rng, chunked = random.Random(20250101), 0
    for _ in range(STATE_COUNT):
        state = PlannerState(rng)
        fast, literal = state.fast(native), state.literal()
        assert fast.ttft_s == pytest.approx(literal.ttft_s, rel=1e-9, abs=1e-9)
        assert [len(chunk.group) for chunk in fast.chunks] == [len(chunk.group) for chunk in literal.chunks]
        # rounding may move a boundary by one token: the closed form and the solver differ in the last bits
        assert [chunk.tokens for chunk in fast.chunks] == pytest.approx([c.tokens for c in literal.chunks], abs=1)
        chunked += len(fast.chunks) > 1
    # the comparison must not be of single-chunk plans only
    assert chunked > STATE_COUNT / 10


def test_fast_plans_equal_literal_plans_without_pruning() -> None:
    # coefficients for which the lower bound of the rest does not hold
    odd = Eq1Latency(
        {s: Eq1Coefficients(c.a, c.b, c.d, c.d * (1.3 if s == 4 else 1.0)) for s, c in TABLE.sizes.items()}
    )
    rng = random.Random(3)
    for _ in range(300):
        state = PlannerState(rng, 16)
        literal = state.literal(odd)
        for native in (False, True) if HAVE_NATIVE else (False,):
            assert state.fast(native, odd).ttft_s == pytest.approx(literal.ttft_s, rel=1e-9)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.integers(0, 1 << 30))
def test_chunks_cover_the_prompt_on_growing_groups_within_the_estimated_time(seed: int) -> None:
    state = PlannerState(random.Random(seed), 64)
    plan = state.fast(HAVE_NATIVE)
    assert sum(chunk.tokens for chunk in plan.chunks) == state.tokens
    assert all(chunk.tokens > 0 for chunk in plan.chunks)
    at, past, before = 0.0, state.cached, set()
    for tokens, group in plan.chunks:
        assert before < set(group), "groups are nested and grow"
        assert len(group) == len(set(group)) in state.sizes
        start = max(at, *(state.queue_s[i] for i in group))  # not before its group is free, nor its predecessor done
        at = start + TABLE.prefill_s(past, tokens, GroupShape(len(group)))
        past, before = past + tokens, set(group)
    assert at == pytest.approx(plan.ttft_s)
    planner = CdspPlanner(TABLE, state.sizes, state.nodes)
    single = planner.plan(state.tokens, state.queue_s, state.rate, state.cached, single=True)
    assert len(single.chunks) == 1
    assert plan.ttft_s <= single.ttft_s + 1e-9
    idle = planner.plan(state.tokens, [0.0] * len(state.nodes), state.rate, state.cached)
    # chunking gains only by starting on free instances while others are busy
    assert len(idle.chunks) == 1, "no queues, no gaps to fill"


def test_groups_stay_inside_nodes_where_possible() -> None:
    planner = LiteralPlanner(TABLE, [2, 4, 8, 16], [i // 8 for i in range(24)], 0.0)
    pool = {i: float(i % 8) for i in range(24)} | {9: 0.5, 10: 0.5}
    assert planner.get_group(pool, (), 3) == (8, 9, 10)  # the node whose third queue is shortest
    assert planner.get_group(pool, (16, 17), 4) == (16, 17, 18, 19)  # first inside the held node
    assert planner.get_group(pool, (0,), 16) == tuple(range(16))  # the rest on one more node
    assert planner.get_group(pool, (), 24) == tuple(range(24))


def test_sizes_without_coefficients_are_refused() -> None:
    with pytest.raises(ConfigError, match="SP sizes"):
        CdspPlanner(eq1.tetris_table1(), [3], [0] * 8)


def test_higher_improvement_rates_give_smaller_groups() -> None:
    sizes, nodes = [1, 2, 4, 8, 16], [i // 8 for i in range(16)]
    planner = CdspPlanner(TABLE, sizes, nodes)
    groups = [len(planner.plan(32_768, [0.0] * 16, rate).chunks[0].group) for rate in (0.0, 0.2, 0.4, 0.7)]
    assert groups == sorted(groups, reverse=True)
    assert groups[0] > groups[-1]
