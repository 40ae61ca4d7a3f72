"""What full runs of experiments gave: the record is of the code that is here, and each failing row has one cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway_research.base import SCHEMA, ClaimRow, ExperimentReport, RunOptions
from headway_research.papers import PAPERS
from headway_research.recorded import (
    NO_PAPER,
    RecordedRow,
    RecordedRun,
    causes,
    digest,
    in_words,
    names,
    recorded,
    to_record,
    totals,
    write,
)
from headway_research.registry import EXPERIMENTS, experiment, listing
from headway_research.verdicts import allowed, band, judge

TIMED = {"tetris.table2", "pecsched.table7", "pecsched.fig15"}
"""By the machine's clock: no two runs are alike."""
SIMULATED = {"medha.fig7", "medha.fig19", "medha.fig20", "mnemosyne.fig17", "mnemosyne.fig18", "mnemosyne.fig19",
             "tetris.chunking-bound"}  # fmt: skip
"""Of those that take seconds; `make test-long` has them."""
SHORT = [name for name, entry in EXPERIMENTS.items() if entry.cost == "sec" and name not in TIMED]


def test_every_failing_row_has_one_cause_and_no_cause_is_stale() -> None:
    failing = [(name, row.claim) for name, run in recorded().items() for row in run.rows if row.state == "fails"]
    for name, claim in failing:
        found = [c for c in causes() if name in c.ids and any(names(written, claim) for written in c.claims)]
        assert len(found) == 1, (name, claim)
    for cause in causes():
        assert cause.reason
        for written in cause.claims:
            assert any(name in cause.ids and names(written, claim) for name, claim in failing), written
        for name in cause.ids:
            assert any(name == at and any(names(w, claim) for w in cause.claims) for at, claim in failing), name


def test_what_is_laid_to_the_paper_or_its_setting_is_shown_by_a_row() -> None:
    for cause in causes():
        assert (cause.shown is not None) == (cause.cause in ("paper", "setting")), cause.claims
        if cause.shown is not None:
            name, claim = cause.shown
            assert [row for row in recorded()[name].rows if row.claim == claim], cause.shown


def check_report(name: str, data: dict[str, Any]) -> None:
    """An experiment's rows have what a reader asks for, and verdicts that there are."""
    assert (data["schema"], data["id"]) == (SCHEMA, name)
    assert set(data) == {"schema", "id", "source", "rows", "panels"}
    assert {"latency", "scenario", "seeds", "window_s"} <= set(data["source"])
    assert data["rows"]
    for row in data["rows"]:
        assert set(row) == {"claim", "paper", "ours", "kind", "verdict", "why"}
        assert set(row["ours"]) == {"paper_mode", "default_mode"}
        assert allowed(row["verdict"]), row["verdict"]
        assert row["why"]
    json.dumps(data, allow_nan=False)
    claims = [row["claim"] for row in data["rows"]]
    assert len(set(claims)) == len(claims)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SIMULATED else ()) for name in SHORT]
)
def test_what_is_recorded_is_what_the_code_gives(name: str) -> None:
    data: dict[str, Any] = experiment(name)(RunOptions()).to_json(name)
    check_report(name, data)
    again = f"`python scripts/record_reproductions.py {name}`, then causes.yaml and make docs"
    assert to_record(data, data, 0.0).rows == recorded()[name].rows, again


def test_headline_claims_are_recorded_rows() -> None:
    for paper in PAPERS.values():
        for name, start in paper.headlines:
            assert [row for row in recorded()[name].rows if row.claim.startswith(start)], (name, start)


def test_the_list_fits_80_columns_and_has_totals() -> None:
    lines = listing().split("\n")
    assert max(map(len, lines)) <= 80
    assert "all papers:" in lines


def _row(claim: str, verdict: str, paper: str | None = "1") -> RecordedRow:
    return RecordedRow(claim, paper, "trend", verdict, "1", "2")


def test_a_claim_of_two_figures_counts_once_and_rows_of_no_paper_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = _row("both", "holds")
    runs = {
        "a.x": RecordedRun(seeds=(), cpu_s=1, quick="", rows=(shared, _row("own", "holds", None))),
        "b.y": RecordedRun(seeds=(), cpu_s=1, quick="", rows=(shared, _row("fails", "not reproduced: 1, not 2"))),
    }
    monkeypatch.setattr("headway_research.recorded.recorded", lambda: runs)
    counts = totals(runs)
    assert (counts["holds", "trend"], counts["fails", "trend"], counts["own", "holds"]) == (1, 1, 1)
    assert in_words(counts).startswith("2 claims, each once: 1 hold (0 two-sided, 0 one-sided, 1 trend, 0 exact)")
    assert runs["a.x"].verdict() == "1 of 1, own 1 of 1"


@pytest.mark.parametrize(
    ("seeds", "why", "one"),
    [([0], "", True), ([0, 1, 2], "", False), ([0, 1, 2], "expected 1. First seed only.", True), ([], "", False)],
)
def test_rows_keep_their_values_and_those_of_one_seed_are_marked(seeds: list[int], why: str, one: bool) -> None:
    row = judge("c", {"8B": 2}, band(0, 2), {"paper": 1.5, "default": None}, why)
    own = judge("d", NO_PAPER, band(0, 2), {"paper": None, "default": 9.0})
    data = ExperimentReport(source={"seeds": seeds}, rows=(row, own)).to_json("x")
    kept = to_record(data, data, 2.5)
    first, second = kept.rows
    assert (first.paper, first.kind, first.state, first.found) == ("8B 2", "two-sided", "holds", "1.5")
    assert first.one_seed == one
    assert (second.paper, second.state, second.found) == (None, "fails", "9.0")
    assert (kept.cpu_s, kept.quick) == (2.5, digest(data))


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    import msgspec

    run = RecordedRun(seeds=(0, 1), cpu_s=1.5, quick="ab", rows=(_row("c", "holds"), _row("d", "holds", None)))
    write({"x.y": run, "x.z": run}, tmp_path / "r.json")
    assert msgspec.json.decode((tmp_path / "r.json").read_bytes(), type=dict[str, RecordedRun])["x.z"] == run


def test_a_digest_changes_with_values_and_not_with_notes() -> None:
    rows = [
        ClaimRow(claim="c", paper=1, paper_mode=v, default_mode=1, kind="exact", verdict="holds", why=w)
        for v, w in ((1, "a"), (1, "b"), (2, "a"))
    ]
    found = [digest(ExperimentReport(source={"seeds": []}, rows=(row,)).to_json("x")) for row in rows]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("written", "claim", "same"),
    [("a b", "a b", True), ("a b", "a bc", False), ("a…", "abc", True), ("…c", "abc", True), ("a…c", "abd", False)],
)
def test_a_cause_names_claims_whole_or_by_their_ends(written: str, claim: str, same: bool) -> None:
    assert names(written, claim) == same
