"""The prefill-time cache agrees with Medha's Algorithm 3, and behaves as a cache of totals should."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.latency_models import gpu_roofline, literal_prefill_s, table, tables
from tests.helpers.unit_latency import Linear

from headway.perf.latency.base import BatchLoad, PrefillCache, load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.table import TableLatency


@given(tables(), st.lists(st.integers(0, 30_000), min_size=2, max_size=8), st.floats(2e-3, 0.1))
@settings(max_examples=60)
def test_it_starts_at_zero_and_never_falls(model: TableLatency, lengths: list[int], t_target_s: float) -> None:
    cache = PrefillCache(model, t_target_s)
    assert cache.total_s(0) == 0.0
    seconds = [cache.total_s(n) for n in sorted(lengths)]
    assert seconds == sorted(seconds)
    assert seconds == [PrefillCache(model, t_target_s).total_s(n) for n in sorted(lengths)]  # whatever was asked before


def test_it_never_falls_inside_the_first_chunk_either() -> None:
    """A measured staircase does: 128 rows are faster than 127."""
    model = table([(0, 1e-3), (127, 4e-3), (128, 3e-3), (512, 9e-3)], [(0, 0.0, 0.0), (512, 0.0, 0.0)], (0, 0, 0))
    cache = PrefillCache(model, 0.009)
    seconds = [cache.total_s(n) for n in range(600)]
    assert seconds == sorted(seconds)
    assert cache.total_s(128) == pytest.approx(3e-3)


@given(st.integers(0, 200_000), st.integers(0, 200_000))
@settings(max_examples=30)
def test_what_is_done_and_what_remains_add_up(a: int, b: int) -> None:
    done, total = sorted((a, b))
    cache = PrefillCache(gpu_roofline(), 0.02)
    assert cache.total_s(done) + cache.remaining_s(total, done) == pytest.approx(cache.total_s(total))
    assert cache.remaining_s(total, total) == 0.0


@pytest.mark.parametrize("t_target_s", [0.01, 0.02, 0.05])
@pytest.mark.parametrize("tokens", [2_000, 8_192, 65_536, 393_000, 1_000_000])
def test_it_agrees_with_algorithm_3_within_2_percent(t_target_s: float, tokens: int) -> None:
    """At the edges of chunks; between them Algorithm 3's own look-up interpolates too."""
    model = gpu_roofline()
    cache = PrefillCache(model, t_target_s, 16)
    literal_s = literal_prefill_s(model, tokens, t_target_s, 16)
    assert cache.total_s(tokens) == pytest.approx(literal_s, rel=0.02, abs=t_target_s)


def test_a_prompt_of_one_chunk_is_exact() -> None:
    model = gpu_roofline()
    alone_s = load_s(model, BatchLoad().with_chunk(700, model.attention_s(0, 700)))
    assert PrefillCache(model, 0.05).total_s(700) == pytest.approx(alone_s)


def test_minimum_chunk_is_used_where_no_chunk_fits_the_budget() -> None:
    """The paper's loop ends there and calls the rest free; a 10 ms floor under a 5 ms target is the plainest case."""
    model = Linear(row_s=1e-4, fixed_s=0.01)
    cache = PrefillCache(model, 0.005, min_chunk=16)
    assert cache.total_s(16_000) == pytest.approx(1000 * (0.01 + 16e-4))


def test_refresh_follows_a_model_that_has_learned_and_only_then() -> None:
    model = CorrectedLatency(gpu_roofline())
    cache = PrefillCache(model, 0.02)
    before = cache.total_s(50_000)
    assert not cache.refresh()
    for _ in range(60):
        load = BatchLoad(256, 0, 0, model.attention_s(4096, 256))
        model.observe(load, 2.0 * load_s(model.base, BatchLoad(256, 0, 0, model.base.attention_s(4096, 256))))
    assert cache.refresh()
    assert cache.total_s(50_000) > 1.5 * before
    assert not cache.refresh()


def test_equal_changes_of_all_terms_rescale_times_without_computing_them_anew() -> None:
    model = CorrectedLatency(gpu_roofline())
    cache = PrefillCache(model, 0.02)
    before = [cache.total_s(tokens) for tokens in (10, 50_000)]
    knots = cache._tokens
    model._k_fixed = model._k_rows = model._k_chunk = 1.3
    assert cache.refresh()
    assert cache._tokens is knots
    assert [cache.total_s(tokens) for tokens in (10, 50_000)] == pytest.approx([1.3 * seconds for seconds in before])
    # Knots that are added later have the same unit: the cache stays monotone.
    assert cache.total_s(200_000) > cache.total_s(50_000)
    model._k_chunk = 2.0
    assert cache.refresh()
    assert cache._tokens is not knots
