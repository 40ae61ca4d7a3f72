"""`headway profile` measures, serves, and leaves a table that is corrected by what serving took."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkpoints import make_tiny
from headway.cli.main import main
from headway.latency import store


def test_the_table_is_corrected_by_serving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = make_tiny("llama", tmp_path / "model"), tmp_path / "table.json"
    command = ["profile", str(model), "--threads", "1", "--budget", "0.5", "--out", str(out)]
    assert main([*command, "--serve-for", "2"]) == 0
    served = re.search(r"served for 2 s, ([\d,]+) iterations", capsys.readouterr().out)
    assert served is not None
    iterations = served[1]
    source = store.load(out, None)
    assert source.provenance.endswith(f"corrected by {iterations} iterations of serving")
    assert main([*command, "--serve-for", "0"]) == 0
    assert "corrected" not in store.load(out, None).provenance
