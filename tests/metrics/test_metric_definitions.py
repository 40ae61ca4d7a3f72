from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sim import metrics as d
from headway.sim.metrics import NO_TARGETS, RequestRecord, SloTargets


def record(tokens: tuple[float, ...] = (1.5, 1.6, 1.8), **changes: object) -> RequestRecord:
    base: dict[str, object] = {
        "id": "a",
        "klass": "short",
        "arrival_s": 1.0,
        "prompt_tokens": 10,
        "output_tokens": len(tokens),
        "token_s": tokens,
        "finish_s": 2.0,
    }
    return RequestRecord(**{**base, **changes})


def test_the_definitions_on_one_request() -> None:
    one = record(scheduled_s=1.2)
    assert d.ttft_s(one) == pytest.approx(0.5)
    assert d.tbt_s(one) == pytest.approx([0.1, 0.2])
    assert d.tpot_s(one) == pytest.approx(0.15)
    assert d.e2e_s(one) == pytest.approx(1.0)
    assert d.queueing_s(one) == pytest.approx(0.2)
    assert d.normalised_latency_s(one) == pytest.approx(1 / 3)


def test_metrics_that_a_record_lacks_times_for_are_none() -> None:
    empty = record((), finish_s=None)
    assert d.ttft_s(empty) is d.tpot_s(empty) is d.e2e_s(empty) is d.queueing_s(empty) is None
    assert d.normalised_latency_s(empty) is None
    assert d.tbt_s(empty) == []
    assert d.tpot_s(record((1.5,))) is None


def test_a_chunk_of_k_tokens_is_one_gap_and_zeros() -> None:
    assert d.tbt_s(record((1.0, 2.0, 2.0, 2.0))) == [1.0, 0.0, 0.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_gaps_sum_to_last_minus_first_and_tpot_is_their_mean(times: list[float]) -> None:
    ordered = tuple(sorted(times))
    one = record(ordered)
    assert sum(d.tbt_s(one)) == pytest.approx(ordered[-1] - ordered[0], abs=1e-6)
    if len(ordered) > 1:
        assert d.tpot_s(one) == pytest.approx(sum(d.tbt_s(one)) / (len(ordered) - 1), abs=1e-6)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (NO_TARGETS, True),
        (SloTargets(ttft_s=0.5001), True),
        (SloTargets(ttft_s=0.4), False),
        (SloTargets(tbt_s=0.21), True),
        (SloTargets(tbt_s=0.15), False),
        (SloTargets(tpot_s=0.16), True),
        (SloTargets(tpot_s=0.14), False),
        (SloTargets(e2e_s=1.1), True),
        (SloTargets(ttft_s=0.6, e2e_s=0.9), False),
    ],
)
def test_good_means_every_objective_met(slo: SloTargets, good: bool) -> None:
    assert d.is_good(record(slo=slo)) is good


def test_failed_or_unfinished_requests_are_never_good_and_one_token_has_no_gap_to_miss() -> None:
    assert not d.is_good(record(error="HTTP 500: x"))
    assert not d.is_good(record(finish_s=None))
    assert not d.is_good(record((), slo=SloTargets(ttft_s=10)))
    assert d.is_good(record((1.5,), slo=SloTargets(tbt_s=0.001, tpot_s=0.001)))
