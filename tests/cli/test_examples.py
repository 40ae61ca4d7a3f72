"""`headway examples`: every file is listed with what it says of itself, and copied where it is not there yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cli.main import examples_folder, main


def test_every_example_is_listed_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["examples"]) == 0
    *lines, _, where, _ = capsys.readouterr().out.splitlines()
    files = {path for path in examples_folder().rglob("*.*") if path.suffix != ".pyc"}
    assert {line.split()[0] for line in lines} == {path.relative_to(examples_folder()).as_posix() for path in files}
    assert all(len(line.split()) > 3 for line in lines)
    assert str(examples_folder()) in where


def test_copies_leave_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "cluster.yaml").write_text("mine")
    assert main(["examples", "--copy"]) == 0
    assert (tmp_path / "examples" / "cluster.yaml").read_text() == "mine"
    assert (tmp_path / "examples" / "accel" / "stage.yaml").exists()
    assert "1 were there" in capsys.readouterr().out
    assert main(["examples", "--copy", "examples/cluster.yaml/x"]) == 2
    assert capsys.readouterr().err.startswith("headway: error: cannot write ")
