"""`headway profile` measures, serves, and leaves a table that is corrected by what serving took."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.helpers.checkpoints import make_tiny

from headway.cli.main import main
from headway.perf.latency import table


@pytest.mark.long
def test_the_table_is_corrected_by_serving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = make_tiny("llama", tmp_path / "model"), tmp_path / "table.json"
    command = ["profile", str(model), "--threads", "1", "--budget", "0.5", "--out", str(out)]
    assert main([*command, "--serve-for", "2"]) == 0
    printed = capsys.readouterr().out
    served = re.search(r"served for 2 s, ([\d,]+) iterations", printed)
    assert served is not None
    # What the table comes to, and the table last.
    assert re.search(r"next chunk in iterations of \d+ ms, in tokens:  [\d,]+ after 0", printed)
    assert "histories up to" in printed.splitlines()[-1]
    iterations = served[1]
    source = table.load(out, None)
    assert source.provenance.endswith(f"corrected by {iterations} iterations of serving")
    # What HTTP, processes and the client add to a request, measured at the client.
    assert source.serving is not None
    assert 1e-4 < source.serving.request_s < 1.0
    assert f"a server adds {source.serving.words()}" in printed
    assert main([*command, "--serve-for", "0"]) == 0
    assert "corrected" not in table.load(out, None).provenance


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "-1"], "--budget must be above 0 seconds, not -1"),
        (["--serve-for", "-5"], "--serve-for must be 0 seconds or more, not -5"),
    ],
)
def test_times_that_are_none_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_a_context_that_is_short_is_served_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = make_tiny("llama", tmp_path / "model"), tmp_path / "table.json"
    command = ["profile", str(model), "--threads", "1", "--budget", "0.2", "--out", str(out), "--max-model-len", "64"]
    assert main([*command, "--serve-for", "1.5"]) == 0
    printed = capsys.readouterr()
    assert "served for 2 s" in printed.out
    assert "warning" not in printed.err


def test_a_table_is_kept_where_nothing_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = make_tiny("llama", tmp_path / "model"), tmp_path / "table.json"
    command = ["profile", str(model), "--threads", "1", "--budget", "0.2", "--out", str(out)]
    (model / "tokenizer.json").write_text("{")
    assert main([*command, "--serve-for", "1"]) == 0
    assert "could not serve, so the table is as measured" in capsys.readouterr().err
    assert "corrected" not in table.load(out, None).provenance
