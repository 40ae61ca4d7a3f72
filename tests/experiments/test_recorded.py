"""What full runs of experiments gave: recorded verdicts are those of the code, and each failing row has one cause."""

from __future__ import annotations

import pytest

from headway_research.base import ClaimRow, ExperimentReport, RunOptions
from headway_research.recorded import (
    FailingRow,
    OneModeRow,
    RecordedRun,
    UndecidedRow,
    causes,
    recorded,
    to_record,
)
from headway_research.registry import EXPERIMENTS, experiment
from headway_research.verdicts import band, judge

TIMED = {"tetris.table2"}
"""By the machine's clock: no two runs are alike."""
SIMULATED = {"medha.fig7", "medha.fig19", "medha.fig20", "mnemosyne.fig17", "mnemosyne.fig18", "mnemosyne.fig19"}
"""Of those that take seconds; `make test-long` has them."""
SHORT = [name for name, entry in EXPERIMENTS.items() if entry.cost == "seconds" and name not in TIMED]


def test_every_failing_row_has_one_cause_and_no_cause_is_stale() -> None:
    failing = {(name, row.claim) for name, run in recorded().items() for row in run.failing}
    named = [(name, claim) for cause in causes() for name in cause.ids for claim in cause.claims]
    assert failing - set(named) == set()
    for cause in causes():
        assert cause.reason
        assert all(any((name, claim) in failing for name in cause.ids) for claim in cause.claims), cause.claims
        assert all(any((name, claim) in failing for claim in cause.claims) for name in cause.ids), cause.ids
    assert all(named.count(row) == 1 for row in failing)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SIMULATED else ()) for name in SHORT]
)
def test_what_is_recorded_is_what_the_code_gives(name: str) -> None:
    now = to_record(experiment(name)(RunOptions()).to_json(name))
    run = recorded()[name]
    again = (
        "`headway reproduce ID --json DIR/ID.json`, then scripts/record_reproductions.py DIR, causes.yaml and make docs"
    )
    assert now["rows"] == run.rows, again
    assert [row["claim"] for row in now["failing"]] == [row.claim for row in run.failing], again
    assert [row["found"] for row in now["failing"]] == [row.found for row in run.failing], again
    assert [(row["claim"], row["mode"]) for row in now["one_mode"]] == [
        (row.claim, row.mode) for row in run.one_mode
    ], again


def test_rows_say_how_many_long_requests_their_means_are_over() -> None:
    counts = {"busy": {"7B": [4], "70B": [2]}, "many": {"7B": [10] * 5, "70B": [30]}, "trace": {"7B": [90]}}
    rows = tuple(
        ClaimRow(claim=claim, paper=1, paper_mode=1, default_mode=1, verdict=verdict, why="because")
        for claim in ("busy: JCT", "trace: JCT", "many: JCT", "70B: JCT by load")
        for verdict in ("not reproduced: 1, not 2", "exact")
    )
    data = ExperimentReport(source={"seeds": [0], "long_requests": counts}, rows=rows).to_json("x")
    assert [row["verdict"] for row in data["rows"][:2]] == ["undecided: 2 to 4 long requests"] * 2
    assert data["rows"][1]["why"] == "by so few: exact. because"
    kept = to_record(data)
    assert [row["longs"] for row in kept["failing"]] == ["90", "10 to 30", "2 to 90"], (
        "enough, also over seeds together"
    )
    assert kept["undecided"] == [{"claim": "busy: JCT", "longs": "2 to 4 long requests"}] * 2
    run = RecordedRun((0,), 8, tuple(FailingRow(**row) for row in kept["failing"]), (), (UndecidedRow("c", "2"),) * 2)
    assert run.verdict() == "3 of 8 hold, 2 undecided, one seed"


@pytest.mark.parametrize(
    ("seeds", "why", "one"),
    [([0], "", True), ([0, 1, 2], "", False), ([0, 1, 2], "expected 1. First seed only.", True), ([], "", False)],
)
def test_rows_of_one_seed_are_marked(seeds: list[int], why: str, one: bool) -> None:
    missed = "not reproduced: 1, not 2"
    row = ClaimRow(claim="c", paper={"8B": 2}, paper_mode=1, default_mode=1, verdict=missed, why=why)
    held = ClaimRow(claim="d", paper=1, paper_mode=1, default_mode=1, verdict="exact", why="")
    kept = to_record(ExperimentReport(source={"seeds": seeds}, rows=(row, held)).to_json("x"))
    assert kept == {
        "seeds": seeds,
        "rows": 2,
        "failing": [{"claim": "c", "paper": "8B 2", "found": "1, not 2", "one_seed": one}],
        "one_mode": [],
    }


def test_a_row_that_one_mode_meets_is_neither_held_nor_failed() -> None:
    row = judge("c", 1, band(0, 2), {"paper": 1.5, "default": 9.0})
    kept = to_record(ExperimentReport(source={"seeds": []}, rows=(row,)).to_json("x"))
    one = {"claim": "c", "paper": "1", "mode": "paper", "paper_mode": "1.5", "default_mode": "9.0"}
    assert (kept["failing"], kept["one_mode"]) == ([], [one])
    run = RecordedRun(seeds=(), rows=1, failing=(), one_mode=(OneModeRow(**one),))
    assert run.verdict() == "0 of 1 hold, 1 in one mode only"
