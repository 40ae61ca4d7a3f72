"""Counts of latencies that requests asked for, without a host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headway.core.request import Request, Slo
from headway.policy.hosted.report import HostStats, SloCounts
from headway.policy.iteration.requests import PrefillState


def completed(name: str, slo: Slo, outputs: int = 11) -> tuple[PrefillState, SimpleNamespace]:
    request = Request(id=name, arrival_s=10.0, prompt_tokens=5, max_output_tokens=20, slo=slo)
    return PrefillState(request, 0), SimpleNamespace(num_output_tokens=outputs)


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        (Slo(ttft_s=1.1), {"asked", "met"}),
        (Slo(ttft_s=0.9), {"asked", "missed", "missed_ttft"}),
        (Slo(tbt_s=0.11), {"asked", "met"}),
        (Slo(tbt_s=0.09), {"asked", "missed", "missed_tpot"}),
        (Slo(ttft_s=0.9, tbt_s=0.09), {"asked", "missed", "missed_ttft", "missed_tpot"}),
        (Slo(), set()),
    ],
)
def test_a_request_counts_by_what_it_asked_for(slo: Slo, expected: set[str]) -> None:
    counts = SloCounts()
    counts.scheduled(1, [completed("a", slo)])
    counts.returned(1, 11.0)  # 1 s after its arrival
    counts.ended("a", 12.0)  # ten gaps in 1 s
    assert {what for what, _ in counts.counts} == expected
    assert set(counts.counts.values()) <= {1}


def test_a_preempted_request_has_one_first_token_and_an_aborted_one_none() -> None:
    counts = SloCounts()
    pair = completed("a", Slo(ttft_s=2.0))
    counts.scheduled(1, [pair, completed("gone", Slo(ttft_s=2.0))])
    counts.ended("gone", 10.5)
    counts.returned(1, 11.0)
    counts.scheduled(2, [pair])
    counts.returned(2, 20.0)
    counts.ended("a", 21.0)
    counts.ended("gone", 21.0)
    assert counts.counts == {("asked", "short"): 1, ("met", "short"): 1}


def test_steps_that_never_return_are_forgotten() -> None:
    counts = SloCounts()
    for step in range(100):
        counts.scheduled(step, [completed(f"r{step}", Slo(ttft_s=1.0))])
    counts.returned(0, 11.0)
    counts.ended("r0", 12.0)
    assert not counts.counts


def test_a_snapshot_has_the_median_of_decisions_and_the_mean_error() -> None:
    stats = HostStats()
    assert stats.snapshot(0)["decision_s"] == {"0.5": 0.0, "0.99": 0.0}
    for seconds in (1e-4, 2e-4, 3e-4):
        stats.decided(seconds)
        stats.measured(0.1, 0.05)
    snapshot = stats.snapshot(2)
    assert snapshot["decision_s"]["0.5"] == 2e-4
    assert snapshot["policy_errors"] == 2
    assert snapshot["seconds"]["predicted"] == pytest.approx(0.15)
    assert snapshot["prediction_error"] == pytest.approx(0.5 * (1 - 0.98**3))
