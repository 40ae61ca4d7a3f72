"""What a live calibration takes from a run and its client: times on the way, after idling, and how iterations vary."""

from __future__ import annotations

import pytest
from tests.helpers.latency_models import table

from headway.policy.iteration.config import SchedulerConfig
from headway.serving.load.calibration import overhead_of
from headway.sim.metrics import RequestRecord
from headway.sim.replay import BatchTimes, ReplayedRun

# An iteration takes 10 ms, whatever it holds.
TABLE = table([(0, 0.01), (1, 0.01), (4096, 0.01)], [(0, 0.0, 0.0), (4096, 0.0, 0.0)], (0.0, 0.0, 0.0))
TERMS = (0.01, 0.0, 0.0, 0.0)


def record(name: str, sent_s: float, first_s: float) -> RequestRecord:
    return RequestRecord(
        id=name, klass="", arrival_s=sent_s, prompt_tokens=8, output_tokens=1, token_s=(first_s,), sent_s=sent_s
    )


def a_run() -> ReplayedRun:
    """Iterations of 10 ms, one in a hundred of 30, 1 ms apart; the first after idling ends 16 ms after the arrival.
    The live scheduler expected 20 ms of each."""
    run = ReplayedRun(SchedulerConfig(), TABLE, TABLE, 4096, 16)
    for number in range(200):
        run.batches.append(BatchTimes(0.02, 0.01, 0.03 if number % 100 == 99 else 0.01, 0.001, None, TERMS))
    run.batches += [BatchTimes(0.02, 0.01, 0.014, 0.0, 0.016, TERMS)] * 8
    # In the engine every first token takes 12 ms.
    run.records += [record(f"{kind}{i}", 0.0, 0.012) for kind in ("busy", "alone") for i in range(6)]
    return run


def test_time_after_idling_is_measured_against_the_corrected_table_and_holds_what_a_lone_request_waits_longer() -> None:
    busy = [record(f"busy{i}", 0.0, 0.015) for i in range(6)]
    alone = [record(f"alone{i}", 0.0, 0.019) for i in range(6)]
    only = overhead_of(a_run(), busy)
    assert only.request_s == pytest.approx(0.003)
    assert only.iteration_s == pytest.approx(0.001)
    assert only.idle_s == pytest.approx(0.016 - 0.010 - 0.001, abs=5e-4)
    both = overhead_of(a_run(), busy, alone)
    assert both.request_s == only.request_s
    assert both.idle_s - only.idle_s == pytest.approx(0.004)


def test_spread_of_iterations_is_of_the_busy_ones_with_the_time_between_them() -> None:
    (spread,) = overhead_of(a_run(), []).spread
    assert spread.at(0.5) == pytest.approx(1.0, abs=0.03)
    assert spread.at(1.0) == pytest.approx(0.031 / 0.011, rel=0.05)
    assert len(spread.factors) == 200
