"""Commands that draw, where matplotlib is not installed: they say so before they work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.cli.refusals import refusal


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "{cluster}", "--gantt", "out.svg"],
        ["demo"],
        ["reproduce", "medha.eq1", "--plot"],
        ["reproduce", "all", "--plot", "folder"],
        ["accel", "stage", "--plot", "out.png"],
        ["why", "r", "--log", "no-log", "--picture", "out.png"],
    ],
)
def test_a_command_that_cannot_draw_says_so_before_it_works(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = Path(__file__).resolve().parents[2] / "examples"
    places = {"cluster": examples / "cluster-tetris.yaml"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refusal([word.format(**places) for word in words], capsys)
    assert said.endswith("there is no matplotlib here; pip install 'headway[plot]'\n")
    assert not any(tmp_path.iterdir())
