"""scripts/gpu_check.py where there is no GPU: it says so, and its parts work on the device that is here."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from scripts import gpu_check
from scripts.gpu_check import CudaChecks

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--out", str(tmp_path)]) == gpu_check.NO_DEVICE
    assert "no CUDA device" in capsys.readouterr().out
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["machine"]["torch"] == torch.__version__
    assert found["parts"] == {}


@pytest.mark.long
def test_limits_equality_and_speed_run_on_the_device_that_is_here(tmp_path: Path) -> None:
    """Torch's attention kernels on this CPU against our own; the figures are positive and within the limits' order."""
    checks = CudaChecks("cpu:0", tmp_path)
    parts = {
        "limits": lambda: checks.limits(megabytes=4, size=256),
        "equality": checks.equality,
        "speed": lambda: checks.speed(prefills=((64, 128),), decodes=((2, 96),)),
    }
    results = gpu_check.run_parts(parts, time.monotonic() + 60)
    assert not any("error" in one for one in results.values()), results
    assert results["equality"]["greedy_tokens_equal"]
    assert min(results["speed"]["decode 2 of 96"]["ms"], results["speed"]["decode 2 of 96"]["limit_ms"]) > 0
    assert "| prefill 64 over 128 |" in gpu_check.page({"torch": "2"}, results)


def test_a_part_that_fails_is_recorded_and_the_next_one_runs() -> None:
    def broken() -> dict[str, object]:
        raise RuntimeError("kernel image is missing")

    results = gpu_check.run_parts({"first": broken, "second": lambda: {"figure": 1}}, time.monotonic() + 60)
    assert results["first"]["error"] == "RuntimeError: kernel image is missing"
    assert results["second"]["figure"] == 1
    late = gpu_check.run_parts({"first": broken}, time.monotonic() - 1)
    assert late == {"first": {"skipped": "no time was left"}}


def test_the_wheels_are_those_of_the_lock() -> None:
    locked = set(re.findall("^([a-z0-9-]+)==", (ROOT / "requirements" / "serve.lock").read_text(), re.MULTILINE))
    assert set(gpu_check.WHEELS) <= locked
