"""The fast chunk choice is the exhaustive one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.latency_models import gpu_roofline, table, tables

from headway.perf.latency.base import MAX_CHUNK, BatchLoad, LatencyModel, load_s, solve_tokens
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.table import TableLatency


def exhaustive(model: LatencyModel, load: BatchLoad, past: int, limit: int, budget_s: float) -> int:
    """The largest chunk whose whole batch is within the budget, by trying them all."""
    best = 0
    for tokens in range(1, limit + 1):
        if load_s(model, load.with_chunk(tokens, model.attention_s(past, tokens))) <= budget_s:
            best = tokens
    return best


LOADS = st.builds(
    lambda decodes, kv, other, chunk_s: BatchLoad(decodes + other, decodes, kv, chunk_s if other else 0.0),
    st.integers(0, 300),
    st.integers(0, 100_000),
    st.integers(0, 200),
    st.floats(0, 5e-3),
)


@given(tables(), LOADS, st.integers(0, 50_000), st.integers(0, 700), st.floats(0.1, 6.0))
def test_it_equals_exhaustive_search_on_any_table(
    model: TableLatency, load: BatchLoad, past: int, limit: int, factor: float
) -> None:
    budget_s = factor * (load_s(model, load) + 1e-3) + 1e-13  # off every exact sum by more than rounding
    tokens, attention_s = solve_tokens(model, load, past, limit, budget_s)
    assert tokens == exhaustive(model, load, past, limit, budget_s)
    assert attention_s == (model.attention_s(past, tokens) if tokens else 0.0)


@pytest.mark.parametrize("past", [0, 100_000])
@pytest.mark.parametrize("load", [BatchLoad(), BatchLoad(64, 64, 64 * 2_000), BatchLoad(600, 40, 80_000, 2e-3)])
@pytest.mark.parametrize("budget_s", [0.002, 0.055])
def test_it_equals_exhaustive_search_on_a_roofline(past: int, load: BatchLoad, budget_s: float) -> None:
    model = gpu_roofline()
    tokens, _ = solve_tokens(model, load, past, 3_000, budget_s)
    assert tokens == exhaustive(model, load, past, 3_000, budget_s)


def test_the_same_holds_under_learned_scales() -> None:
    model = CorrectedLatency(gpu_roofline())
    for _ in range(30):
        load = BatchLoad(500, 0, 0, model.attention_s(30_000, 500))
        model.observe(load, 1.7 * load_s(model.base, BatchLoad(500, 0, 0, model.base.attention_s(30_000, 500))))
    assert solve_tokens(model, BatchLoad(), 30_000, 3_000, 0.02)[0] == exhaustive(
        model, BatchLoad(), 30_000, 3_000, 0.02
    )


def test_a_staircase_is_climbed_to_the_last_step_that_fits() -> None:
    """Padding to multiples of 128 makes 129 rows slower than 256: the larger chunk is taken."""
    model = table(
        [(0, 1e-3), (127, 4e-3), (128, 3e-3), (129, 6e-3), (255, 6e-3), (256, 4e-3), (257, 9e-3), (512, 9e-3)],
        [(0, 0.0, 0.0), (512, 0.0, 0.0)],
        (0.0, 0.0, 0.0),
    )
    assert solve_tokens(model, BatchLoad(), 0, 512, 5e-3)[0] == 256
    assert solve_tokens(model, BatchLoad(), 0, 255, 5e-3)[0] == 128


def test_a_large_chunk_may_cost_a_tenth_of_smaller_ones() -> None:
    """Wherever the sizes that fit lie, the largest is found, though halving the times themselves would miss it."""
    model = table(
        [(0, 1e-3), (40, 4e-2), (900, 5e-2), (901, 2e-3), (902, 6e-2), (1500, 7e-2)],
        [(0, 0.0, 0.0), (512, 1e-4, 1e-9)],
        (0.0, 0.0, 0.0),
    )
    assert solve_tokens(model, BatchLoad(), 0, 1_500, 3e-3)[0] == 901 == exhaustive(model, BatchLoad(), 0, 1_500, 3e-3)
    assert solve_tokens(model, BatchLoad(), 0, 900, 3e-3)[0] == exhaustive(model, BatchLoad(), 0, 900, 3e-3) == 2


def test_none_fits_where_decodes_fill_the_budget_or_none_is_left() -> None:
    model = gpu_roofline()
    busy = BatchLoad(256, 256, 256 * 60_000)
    assert solve_tokens(model, busy, 0, 512, load_s(model, busy)) == (0, 0.0)
    assert solve_tokens(model, busy, 0, 512, -1.0) == (0, 0.0)
    assert solve_tokens(model, BatchLoad(), 0, -5, 10.0) == (0, 0.0)


def test_no_chunk_is_ever_larger_than_the_tables_reach() -> None:
    assert solve_tokens(gpu_roofline(), BatchLoad(), 0, 10**7, 1e9)[0] == MAX_CHUNK
