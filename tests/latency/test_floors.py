"""Answers to single questions are entries of the vectors, and floors are floors: for every model that has its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.latency_models import tables
from tests.helpers.unit_latency import Linear

from headway.perf.latency.base import MAX_CHUNK, BatchLoad, LatencyModel
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.fitted import fitted
from headway.perf.latency.groups import ShardedModel, WithExchange
from headway.perf.latency.table import TableLatency


def learned(model: LatencyModel) -> LatencyModel:
    corrected = CorrectedLatency(model)
    for _ in range(5):
        corrected.observe(BatchLoad(100, 10, 5_000, corrected.attention_s(300, 90)), 0.5)
        corrected.observe(BatchLoad(1, 1, 10), 1e-5)
    return corrected


MODELS: list[Callable[[LatencyModel], LatencyModel]] = [
    lambda model: model,
    learned,
    lambda model: WithExchange(model, 1e-6),
    lambda model: ShardedModel(model, 700),
    lambda model: WithExchange(ShardedModel(learned(model), 700), 1e-6),
    lambda model: Linear(1e-4),
]


def check(model: LatencyModel, past: int, first: int, last: int) -> None:
    rows, chunks = model.token_s(first, last), model.chunk_s(past, first, last)
    for i in {0, len(rows) // 3, len(rows) - 1}:
        assert model.rows_s(first + i) == rows[i]
        assert model.attention_s(past, first + i) == chunks[i]
    both = model.floor_s(first, past)
    assert both(30) == model.least_rows_s(first + 30) + model.least_attention_s(past, 30)
    floors = [(model.least_rows_s(n), model.least_attention_s(past, n)) for n in range(first, last + 1)]
    for j, (least_rows_s, least_attention_s) in enumerate(floors):
        assert least_rows_s <= rows[j:].min()
        assert least_attention_s <= chunks[j:].min()
    for of in zip(*floors, strict=True):
        assert list(of) == sorted(of)


@pytest.mark.parametrize("wrap", MODELS)
@given(tables(), st.sampled_from([0, 1, 650, 100_000]), st.integers(0, 900))
def test_floors_bound_any_table(
    wrap: Callable[[LatencyModel], LatencyModel], table: TableLatency, past: int, first: int
) -> None:
    check(wrap(table), past, first, first + 40)


@pytest.mark.parametrize("past", [0, 5_000, 1_000_000])
@pytest.mark.parametrize("first", [0, 4_000, MAX_CHUNK - 100, MAX_CHUNK + 1, 2 * MAX_CHUNK - 20])
def test_floors_bound_a_fitted_model_within_and_beyond_its_tables(past: int, first: int) -> None:
    check(fitted("h100", "llama-3-8b"), past, first, first + 100)
