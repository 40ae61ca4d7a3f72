"""KV handed over by NIXL between two real vLLM servers with Headway inside: answers of one, no KV in use afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
NIXL = ROOT / ".nixl"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not (VLLM.exists() and NIXL.is_dir()), reason="needs vLLM and NIXL: make vllm nixl")
def test_two_vllm_servers_answer_as_one_and_keep_no_kv_of_clients_that_left(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.vllm_handover", "--vllm-python", VLLM, "--nixl", NIXL]
    command += ["--lengths", "16,100,1024", "--aborts", "10", "--logs", tmp_path, "--json", figures, "--plugged", "40"]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)
    logs = [log.read_text() for log in sorted(tmp_path.glob("*.log"))]
    ends = "".join(f"\n--- a server's log ends\n{log[-4000:]}" for log in logs)
    assert done.returncode == 0, done.stdout + done.stderr + ends
    assert ["Headway schedules prefills" in log and "policy failed" not in log for log in logs] == [True, True]
    found = json.loads(figures.read_text())
    assert all(row["equal"] and row["bytes"] >= row["prompt_tokens"] * 1024 for row in found["rows"])
    assert (found["aborts"]["wrong"], found["aborts"]["kv_usage"]) == (0, 0)
