"""Real vLLM servers of a cluster that are killed, stopped, cut off and slowed down: no answer is lost, none changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM: make vllm")
def test_no_answer_is_lost_or_changed_by_faults_of_vllm_servers(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.vllm_chaos", "--vllm-python", VLLM, "--faults", "4"]
    command += ["--logs", tmp_path, "--json", figures]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert sorted(row["fault"] for row in found["faults"]) == ["cut", "kill", "slow", "stop"]
    assert (found["changed"], found["lost"]) == (0, [])
    assert found["answers"] >= 4 * 8
