"""`headway profile fit`: files or folders in, one fit out, errors in words."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tests.latency_fit import profile_files as files

from headway.core.errors import ConfigError
from headway.perf.latency.fitted import fitted
from headway_research.fit import command as fit_command


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    fit_command.add_arguments(parser)
    return fit_command.run(parser.parse_args(words))


def test_folder_to_a_fit_that_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.mlp_csv(tmp_path / "in")
    files.attention_csv(tmp_path / "in")
    out = tmp_path / "deep" / "fit.json"
    assert command(str(tmp_path / "in"), "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "a100-80gb: 2 files" in said
    assert "not profiled: will be derived" in said, "there was no network file"
    assert fitted("a100", "llama-3-8b", fit=out).source.provenance == "attention.csv; mlp.csv.gz"


def test_two_accelerators_are_refused(tmp_path: Path) -> None:
    files.mlp_csv(tmp_path, "a100")
    files.mlp_csv(tmp_path, "h100")
    with pytest.raises(ConfigError, match="a100-80gb and h100-80gb: fit one"):
        command(str(tmp_path), "--out", str(tmp_path / "fit.json"))


def test_folder_without_profiles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        command(str(tmp_path), "--out", str(tmp_path / "fit.json"))
    with pytest.raises(ConfigError, match="there is no file"):
        command(str(tmp_path / "none.csv"), "--out", str(tmp_path / "fit.json"))
