"""What is kept of a run of PecSched's setting, and the regimes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headway.perf.latency.base import decode_load, load_s
from headway.perf.latency.fitted import ParallelLayout, fitted
from headway.sim.cluster.result import ClusterResult
from headway.sim.metrics.record import RequestRecord
from headway.sim.result import SimResult
from headway_research.pecsched.overall import _left_out
from headway_research.pecsched.setting import LOADS, MODELS, SWEEP, PecSchedCluster, measure, scenario


def test_sweep_loads_are_ascending_and_set_the_scenario() -> None:
    assert SWEEP[0.5] == "unsaturated"
    assert [LOADS[regime] for regime in SWEEP.values()] == [(load, 0.3) for load in SWEEP]
    workloads = [scenario("Yi 34B", "PecSched", "default", regime, 60.0)["workload"] for regime in SWEEP.values()]
    longs = [one["qps"] * one["long_share"] for one in workloads]
    shorts = [one["qps"] * (1 - one["long_share"]) for one in workloads]
    assert longs == pytest.approx([longs[0]] * len(longs))
    assert [b / a for a, b in pairwise(shorts)] == pytest.approx([b / a for a, b in pairwise(SWEEP)])


def test_decode_replicas_hold_the_kv_that_their_memory_does() -> None:
    """An A100 beside Phi-3 14B holds some 0.24M tokens, and four beside Yi 34B nearly a million."""
    held = {}
    for name, tokens in (("Phi-3 14B", 236_000), ("Yi 34B", 970_000)):
        _, decode = scenario(name, "PecSched", "default", "busy", 60.0)["cluster"]["pools"]
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


def test_a_row_names_the_models_without_a_value() -> None:
    assert _left_out(["a", "b", "c"], {"b": 1.0}).startswith("Nothing about a, c: ")
    assert not _left_out(["a"], {"a": 2.0})


@pytest.mark.parametrize("cluster", MODELS.values(), ids=list(MODELS))
def test_no_cap_on_fused_prompts_leaves_a_long_decode_undisturbed(cluster: PecSchedCluster) -> None:
    # PecSched §5.2 asks for a cap that costs the decode nothing; docs/papers/pecsched.md states these factors.
    latency = fitted("a100", cluster.model, ParallelLayout(tp=cluster.tp))
    alone = decode_load(latency, 1, 100_000)
    cost = {
        tokens: load_s(latency, alone.with_chunk(tokens, latency.attention_s(0, tokens))) / load_s(latency, alone)
        for tokens in (128, 4096)
    }
    assert 1.35 <= cost[128] <= 1.6
    assert 16.5 <= cost[4096] <= 23.5
