"""Rules give the verdict that numbers on either side of their bounds deserve, and rows say in which mode they hold."""

from __future__ import annotations

import math

import pytest

from headway.core.errors import InvariantError
from headway_research import verdicts as v
from headway_research.base import plain


@pytest.mark.parametrize(
    ("check", "inside", "outside"),
    [
        (v.band(1.4, 2.2), [1.4, 1.8, 2.2], [1.39, 2.21, math.nan, None]),
        (v.at_least(30.0), [30.0, 1e9], [29.9, -1.0, math.nan, None]),
        (v.at_most(0.04), [0.04, 0.0], [0.041, math.inf, math.nan, None]),
        (v.exact(10.0, 0.02), [10.0, 10.02, 9.98], [10.03, 9.9, None]),
        (v.exact({"L": 11.0, "S": 6.2}, 0.01), [{"L": 11.0, "S": 6.205}], [{"L": 11.0, "S": 6.3}, {"L": 11.0}, None]),
        (v.ascending("rises"), [{"a": 1.0, "b": 1.0, "c": 2.0}], [{"a": 1.0, "b": 0.9}, {"a": 1.0}, {}, None]),
        (v.descending("falls"), [{"a": 2.0, "b": 1.0}], [{"a": 1.0, "b": 1.1}, None]),
        (v.order("above 1", lambda value: value > 1), [1.1], [1.0, None]),
    ],
)
def test_rules_hold_inside_and_not_outside(check: v.VerdictRule, inside: list[object], outside: list[object]) -> None:
    assert [check(value) for value in inside] == [True] * len(inside)
    assert [check(value) for value in outside] == [False] * len(outside)


@pytest.mark.parametrize(
    ("paper", "default", "verdict", "where"),
    [
        (1.5, 1.6, "holds", "in both modes"),
        (1.5, 9.0, "in paper mode only", "in paper mode only"),
        (9.0, 1.5, "in default mode only", "in default mode only"),
        (None, 1.5, "holds", "in the only mode that applies"),
    ],
)
def test_a_verdict_names_the_modes_in_which_the_rule_holds(
    paper: float | None, default: float, verdict: str, where: str
) -> None:
    row = v.judge("claim", "1.6x", v.band(1.4, 2.2), {"paper": paper, "default": default}, "Because.")
    assert row.verdict == verdict
    assert v.allowed(verdict)
    assert row.why == f"1.4 to 2.2: holds {where}. Because."


def test_a_failed_rule_reports_the_values_found() -> None:
    row = v.judge("claim", "1.6x", v.band(1.4, 2.2), {"paper": 1.0, "default": 3.0})
    assert row.verdict == "not reproduced: 1.0 in paper mode and 3.0 in default mode, not 1.4 to 2.2"
    missing = v.judge("claim", "1.6x", v.band(1.4, 2.2), {"paper": None, "default": None})
    assert missing.verdict == "not reproduced: no value, not 1.4 to 2.2"
    same = v.judge_same("claim", "1.6x", v.band(1.4, 2.2), 3.0)
    assert same.verdict == "not reproduced: 3.0 in both modes, not 1.4 to 2.2"
    empty = v.judge("claim", "rising", v.ascending("rising"), {"paper": None, "default": {}})
    assert empty.verdict == "not reproduced: no value in default mode, not rising"
    assert v.allowed(row.verdict)
    assert v.allowed(missing.verdict)


@pytest.mark.parametrize("approximate", [False, True])
def test_an_impossible_figure_in_one_mode_fails_the_claim(approximate: bool) -> None:
    found = {"paper": 1.13, "default": 0.59}
    row = v.judge("MFU", "50-60%", v.share_of_peak(0.45, 0.65), found, approximate=approximate)
    assert row.verdict == "not reproduced: 1.13 in paper mode, more than the possible 1"
    possible = v.judge("MFU", "50-60%", v.share_of_peak(0.45, 0.65), {"paper": 0.6, "default": 0.59})
    assert possible.verdict == "holds"


def test_an_approximation_is_never_more_than_illustrative() -> None:
    holds = v.judge("c", "p", v.at_least(30), {"paper": 31.0, "default": 31.0}, approximate=True)
    fails = v.judge("c", "p", v.at_least(30), {"paper": 1.0, "default": 1.0}, approximate=True)
    assert holds.verdict == "illustrative"
    assert fails.verdict.startswith("not reproduced: ")


def test_other_verdicts_are_not_allowed() -> None:
    assert not any(map(v.allowed, ["", "good", "not reproduced: ", "exactly", "within band"]))


def test_numbers_are_written_with_four_digits() -> None:
    assert plain({"a": 1.23456, "b": [0.000123456, 7, True, None, "x"]}) == {
        "a": 1.235,
        "b": [0.0001235, 7, True, None, "x"],
    }


def test_rules_say_what_kind_they_are() -> None:
    rules = {v.band(1, 2): "two-sided", v.at_most(1): "one-sided", v.exact(1): "exact", v.order("x", bool): "trend"}
    assert {check.kind: kind for check, kind in rules.items()} == {kind: kind for kind in rules.values()}
    every = v.every(v.at_least(2.0), "load")
    assert (every.kind, every.words) == ("one-sided", "at least 2 for every load")
    assert [every({"a": 2, "b": 3}), every({"a": 2, "b": 1}), every({})] == [True, False, False]


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (v.at_least(0.0), 0.05),
        (v.band(-1.0, 1e9), 0.3),
        (v.order("always", lambda found: True), {"a": 1.0, "b": 2.0}),
        (v.every(v.at_least(0.0)), {"a": 0.1}),
    ],
)
def test_a_rule_that_no_value_can_miss_is_an_error(check: v.VerdictRule, value: object) -> None:
    with pytest.raises(InvariantError, match="no value can miss"):
        v.judge_same("share", "-", check, value)


def test_rules_that_some_value_misses_are_accepted() -> None:
    v.judge_same("c", 1, v.every(v.at_most(0.0)), {"a": 0.0})
    v.judge_same("c", 1, v.order("all there", lambda found: None not in found.values()), {"a": 1.0})
    v.judge_same("c", 1, v.exact("u"), "u")
