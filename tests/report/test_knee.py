"""The knee of a capacity curve, and that pictures of load sweeps mark it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sim.metrics import RequestRecord
from headway.sim.report.plots import compare_figure, knee, monotone, supported_knee, sweep_figure


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
    rising = [(0.5, 0.1, 0.0), (1.0, 0.12, 0.0), (1.5, 0.3, 0.0), (2.0, 5.0, 0.0)]
    found = supported_knee(rising)
    assert found is not None
    assert found.load == knee([(x, y) for x, y, _ in rising])
    assert (found.low, found.high) == (1.5, 2.0)
    # 86 ms, 5.9 s, 156 ms: noise, which the plain rule labels.
    noise = [(0.5, 0.086, 0.0), (0.7, 5.9, 0.0), (0.9, 0.156, 0.0)]
    assert knee([(x, y) for x, y, _ in noise]) is not None
    assert supported_knee(noise) is None
    # Small dents do not count against a curve.
    assert supported_knee([(1, 0.10, 0.0), (2, 0.09, 0.0), (3, 0.8, 0.0), (4, 0.79, 0.0)]) is not None
    assert supported_knee([(1, 0.1, 0.0), (2, 0.2, 0.0)]) is None


def test_a_knee_s_bounds_widen_with_the_intervals_of_its_points() -> None:
    line = [(1.0, 0.1, 0.0), (2.0, 0.4, 0.2), (3.0, 0.6, 0.2), (4.0, 9.0, 1.0)]
    found = supported_knee(line)
    assert found is not None
    assert (found.low, found.high) == (1.0, 4.0)
    assert found.low < found.load < found.high
    open_ended = supported_knee([(1.0, 0.1, 0.0), (2.0, 0.6, 0.2)])
    assert open_ended is not None
    assert open_ended.high == math.inf


def sweep(field: str) -> dict[str, Any]:
    def point(load: float, placement: str) -> dict[str, Any]:
        cuts = {"p50": load**2, "p99": load**3}
        block = {"class": "chat", "ttft_s": cuts, "max_tbt_s": cuts}
        at = {"cluster.placement": placement, field: load}
        return {"at": at, "feasible": True, "mean": {"classes": [block]}, "ci95": None}

    return {"points": [point(load, name) for load in (1.0, 2.0, 4.0) for name in ("tetris", "ladder")]}


def test_knees_are_marked_in_sweeps_of_the_load_only() -> None:
    figure = sweep_figure(sweep("workload.qps"))
    notes = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert notes[0] == ["5× at 2.32/s (2 to 4)"] * 2  # from 4 to 16 by way of 5, in logarithms
    assert len(notes[1]) == 2
    assert notes[2] == []
    assert all(axes.get_xlabel() == "workload.qps" for axes in figure.axes)
    assert not any(axes.texts for axes in sweep_figure(sweep("policy.t_target_s")).axes)


def test_policies_are_compared_by_first_token_and_by_the_last() -> None:
    def record(i: int, klass: str, wait_s: float, end_s: float | None) -> RequestRecord:
        return RequestRecord(
            id=str(i), klass=klass, arrival_s=1.0, prompt_tokens=9, output_tokens=1, token_s=(1.0 + wait_s,),
            finish_s=None if end_s is None else 1.0 + end_s,
        )  # fmt: skip

    one = [record(0, "chat", 0.1, 2.0), record(1, "chat", 0.3, None), record(2, "document", 9.0, 11.0)]
    figure = compare_figure({"ladder": one, "tetris": one[:1]}, "chat")
    first, whole = figure.axes
    drawn = [[float(x) for x in line.get_xdata()] for line in (*first.lines, *whole.lines)]
    assert drawn == [pytest.approx([0.1, 0.3]), pytest.approx([0.1]), [2.0], [2.0]]
    assert "chat" in first.get_title(loc="left")
