"""The knee of a capacity curve, and that charts of load sweeps name it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sim.report.page import knee, monotone, supported_knee, sweep_charts


def test_the_knee_is_where_latency_exceeds_five_times_light_load() -> None:
    line = [(1.0, 1.0), (2.0, 1.0), (4.0, 25.0), (8.0, 900.0)]
    assert knee(line) == pytest.approx(3.0)  # halfway up to 25 in logarithms
    assert knee(list(reversed(line))) == knee(line)
    assert knee(line, 25.0) == pytest.approx(4.0)
    assert knee([(1.0, 1.0), (9.0, 4.9)]) is None
    assert knee([(1.0, 1.0)]) is None
    assert knee([(1.0, 0.0), (2.0, 9.0)]) is None


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12))
def test_a_monotone_fit_rises_keeps_the_mean_and_leaves_rising_values_alone(values: list[float]) -> None:
    fit = monotone(values)
    assert all(one <= other + 1e-12 for one, other in pairwise(fit))
    assert sum(fit) == pytest.approx(sum(values), abs=1e-9)
    assert monotone(sorted(values)) == pytest.approx(sorted(values))

    # No rising sequence is nearer: moving a pool up or down, or the fit itself scaled, only adds squares.
    def off(other: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(values, other, strict=True))

    for shift in (-0.1, 0.1):
        assert off(fit) <= off([each + shift for each in fit]) + 1e-9


def test_a_knee_is_supported_by_a_monotone_curve_only() -> None:
    rising = [(0.5, 0.1), (1.0, 0.12), (1.5, 0.3), (2.0, 5.0)]
    assert supported_knee(rising) == knee(rising)
    # 86 ms, 5.9 s, 156 ms: noise, which the plain rule labels.
    noise = [(0.5, 0.086), (0.7, 5.9), (0.9, 0.156)]
    assert knee(noise) is not None
    assert supported_knee(noise) is None
    # Small dents do not count against a curve.
    assert supported_knee([(1, 0.10), (2, 0.09), (3, 0.8), (4, 0.79)]) is not None
    assert supported_knee([(1, 0.1), (2, 0.2)]) is None


def sweep(field: str) -> dict[str, Any]:
    def point(load: float, placement: str) -> dict[str, Any]:
        cuts = {"p50": load**2, "p99": load**3}
        block = {"class": "chat", "good_share": None, "ttft_s": cuts}
        at = {"cluster.placement": placement, field: load}
        return {"at": at, "feasible": True, "mean": {"classes": [block]}, "ci95": None}

    return {"points": [point(load, name) for load in (1.0, 2.0, 4.0) for name in ("tetris", "ladder")]}


def test_knees_are_named_in_sweeps_of_the_load_only() -> None:
    (chart,) = sweep_charts(sweep("workload.qps"), ())
    # from 1 to 8 by way of 5, in logarithms
    assert chart.note == "; ".join(f"chat · {name}: 5 times its first value at 1.77/s" for name in ("tetris", "ladder"))
    assert chart.x == "workload.qps"
    (chart,) = sweep_charts(sweep("policy.t_target_s"), ())
    assert not chart.note
