"""`headway reproduce`: the list, every experiment's smoke test, the files it writes, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.refusals import refusal
from tests.experiments.test_recorded import SHORT, SIMULATED, TIMED, check_report

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.sim.scenario import parse_scenario
from headway_research.base import RunOptions
from headway_research.papers import PAPERS
from headway_research.recorded import digest, recorded
from headway_research.registry import EXPERIMENTS, experiment, names

PROMISED = {
    *(f"medha.{name}" for name in ("worked-example", "eq1", "fig1", "fig3b", "fig4", "fig5b", "fig7", "fig9", "fig10",
                                   "fig11", "fig12", "fig13", "fig15", "fig16", "fig17", "fig18", "fig19", "fig20",
                                   "headlines")),
    *(f"mnemosyne.{name}" for name in ("fig1", "fig5", "fig7", "fig8", "fig14", "fig15", "fig16", "fig17", "fig18",
                                       "fig19", "fig22", "headlines", "amdahl")),
}  # fmt: skip


SLOW = {
    *("packing-prefetch.case3", "packing-prefetch.case4", "combined.azure", "mnemosyne.fig18"),
    *(f"medha.{name}" for name in ("fig7", "fig9", "fig10", "fig11", "fig13", "fig20", "headlines")),
    *(f"pecsched.{name}" for name in ("fig2", "fig12", "fig13", "table2")),
    *(f"tetris.{name}" for name in ("fig8", "loongserve")),
    *(set(SHORT) - SIMULATED),
}
"""Experiments whose quick runs take a second or more, or whose full runs are short; `make test-long` has them."""


def test_the_list_is_complete_and_every_id_names_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    lines = capsys.readouterr().out.split("\n")[1 : len(EXPERIMENTS) + 1]
    listed = [line.split()[0] for line in lines]
    assert listed == list(EXPERIMENTS)
    assert set(listed) >= PROMISED
    assert all(callable(experiment(name)) for name in listed)


@pytest.mark.parametrize("name", list(PAPERS))
def test_a_paper_is_a_page_of_a_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", name]) == 0
    out = capsys.readouterr().out
    assert " ".join(PAPERS[name].title.split()[:3]) in out
    assert "claims, each once" in out


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in names()]
)
def test_quick_runs_yield_rows_with_allowed_verdicts(name: str) -> None:
    data: dict[str, Any] = experiment(name)(RunOptions(quick=True)).to_json(name)
    check_report(name, data)
    if name not in TIMED:
        # the full run is of this code: a change of behaviour wants a new one
        assert recorded()[name].quick in ("", digest(data)), f"python scripts/record_reproductions.py {name}"


@pytest.mark.parametrize("name", ["medha.worked-example", "mnemosyne.fig22"])
def test_the_same_run_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file in files:
        assert main(["reproduce", name, "--json", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_simulated_figures_do_not_depend_on_processes_or_earlier_runs() -> None:
    from headway_research.medha import setting as medha_setting
    from headway_research.medha.setting import AtRate

    found = []
    for jobs in (1, 2):
        medha_setting.RESULTS.clear()
        runs = medha_setting.MedhaStudy(RunOptions(quick=True, jobs=jobs, window_s=5.0, seeds=(3,)))
        runs.ensure([("Medha", "default"), ("Sarathi-2048", "paper")], [1.75], [0.05])
        found.append([runs.results(AtRate(system, 1.75), "paper" if system != "Medha" else "default")
                      for system in ("Medha", "Sarathi-2048")])  # fmt: skip
    assert found[0] == found[1]


def test_seeds_and_window_reach_the_runs() -> None:
    data = experiment("medha.fig13")(RunOptions(quick=True, seeds=(7,), window_s=8.0)).to_json("medha.fig13")
    assert (data["source"]["seeds"], data["source"]["window_s"]) == ([7], 8.0)
    scenario = parse_scenario(data["source"]["as_scenario_file"])
    assert (scenario.run.window_s, scenario.layout.stages) == (8.0, 2)


def test_a_picture_is_drawn_under_the_name_of_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "medha.eq1", "--plot"]) == 0
    assert (tmp_path / "medha.eq1.png").stat().st_size > 5_000


def test_the_table_shows_claims_and_the_source_of_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "medha.fig3b", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "medha.fig3b" in out
    assert "history measured up to" in out


def test_stdout_holds_only_the_json(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["reproduce", "medha.eq1", "--json", "-"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["id"] == "medha.eq1"


def test_an_unknown_id_names_the_close_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert "medha.fig3b" in refusal(["reproduce", "medha.fig31"], capsys)
    with pytest.raises(ConfigError, match="--list"):
        experiment("qqqq")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["reproduce"], "--list"),
        (["reproduce", "medha.fig13", "--seeds", "a"], "whole numbers"),
        (["reproduce", "medha.fig13", "--window", "-1"], "above 0"),
        (["reproduce", "all", "--json", "-"], "a directory"),
    ],
)
def test_a_bad_argument_gives_a_one_line_error(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(words, capsys)
