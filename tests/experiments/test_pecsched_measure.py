"""What is kept of a run of PecSched's setting, and the regimes."""

from __future__ import annotations

import pytest

from headway.sim.cluster.state import ClusterResult
from headway.sim.metrics import RequestRecord
from headway.sim.result import SimResult
from headway_research.base import RunOptions
from headway_research.pecsched.setting import (
    LOAD,
    LONG_SHARE,
    MODELS,
    REGIMES,
    TRACES,
    PecSchedStudy,
    Regime,
    asked,
    measure,
    scenario,
)


@pytest.mark.parametrize("regime", ["0.8", "0.8, memory"])
def test_a_regime_asks_for_its_share_of_the_cluster_with_one_long_request_in_twenty(regime: Regime) -> None:
    workload = scenario("Yi 34B", "PecSched", "default", regime, 60.0)["workload"]
    assert workload["long_share"] == pytest.approx(LONG_SHARE)
    assert sum(asked("Yi 34B", regime)) == pytest.approx(LOAD)


def test_a_trace_has_its_own_rate_and_lengths() -> None:
    for regime, (rps, shorts) in TRACES.items():
        workload = scenario("Yi 34B", "FIFO", "default", regime, 60.0)["workload"]
        assert (workload["qps"], workload["preset"]) == (pytest.approx(rps), shorts)


def test_regimes_have_thirty_long_requests_a_seed() -> None:
    runs = PecSchedStudy(RunOptions())
    for name in MODELS:
        for regime in REGIMES:
            workload = scenario(name, "FIFO", "default", regime, 60.0)["workload"]
            assert workload["qps"] * workload["long_share"] * runs.window_s(name, regime) > 30


def test_decode_replicas_hold_the_kv_that_their_memory_does() -> None:
    """An A100 beside Phi-3 14B holds some 0.24M tokens, and four beside Yi 34B nearly a million."""
    held = {}
    for name, tokens in (("Phi-3 14B", 236_000), ("Yi 34B", 970_000)):
        _, decode = scenario(name, "PecSched", "default", "0.8", 60.0)["cluster"]["pools"]
        assert decode["kv_tokens"] == pytest.approx(tokens, rel=0.01)
        held[name] = decode["kv_tokens"]
    # 40 layers of 10 KV heads of 128, in 80 GB with 28 GB of weights
    assert held["Phi-3 14B"] * 40 * 2 * 10 * 128 * 2 < 80e9 - 28e9


def _long(arrival_s: float, scheduled_s: float | None, finish_s: float | None) -> RequestRecord:
    return RequestRecord(
        id=f"l{arrival_s}",
        klass="long",
        arrival_s=arrival_s,
        prompt_tokens=100_000,
        scheduled_s=scheduled_s,
        finish_s=finish_s,
    )


def test_starved_and_unfinished_shares_count_only_long_requests_that_arrived_early() -> None:
    """100 s: two of three that came in the first half have not ended; one of four of the first two thirds has not
    begun; what came later is not judged."""
    records = (
        _long(0.0, 1.0, 21.0),
        _long(10.0, 12.0, None),
        _long(49.0, None, None),
        _long(60.0, 70.0, None),
        _long(90.0, None, None),
        RequestRecord(id="s", klass="short", arrival_s=5.0, prompt_tokens=10, scheduled_s=7.0, finish_s=8.0),
        RequestRecord(id="t", klass="short", arrival_s=60.0, prompt_tokens=10, error="unfinished"),
    )
    found = measure(ClusterResult(sim=SimResult(records=records, replicas=(), duration_s=100.0), paused=3))
    assert found.unfinished == pytest.approx(2 / 3)
    assert found.starved == pytest.approx(1 / 4)
    assert found.long_jct_s == pytest.approx((21 + 90 + 51) / 3)
    assert (found.longs, found.pauses, found.short_rps) == (5, 3, pytest.approx(0.01))
    assert found.delay_s["p50"] == pytest.approx(21.0)  # of 2 s, and of 40 s that one has waited until the end
