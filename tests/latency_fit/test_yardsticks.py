"""Public measurements that nothing here was fitted to: vLLM's runs as simulated."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks import yardsticks

from headway.perf.hardware import model_name


@pytest.mark.skipif(not yardsticks.RUNS.is_file(), reason="the measured runs are not beside this checkout")
def test_runs_that_were_left_out_of_the_fit_are_as_far_off_as_the_documentation_says() -> None:
    kept = [run for run in yardsticks.runs() if run["seed"] not in yardsticks.FITTED_ON]
    off = np.median(np.abs(yardsticks.errors([yardsticks.compare(run) for run in kept])), axis=0)
    assert (off <= (0.10, 0.10, 0.08)).all(), off


@pytest.mark.skipif(not yardsticks.RTX4090.is_dir(), reason="the measured run is not beside this checkout")
def test_a_run_is_predicted_from_measured_times_of_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    yardsticks.beside_llmservingsim()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {line[0]: abs(float(line[4].rstrip("%"))) < 3 for line in lines} == dict.fromkeys(
        ("TTFT", "TPOT", "E2E"), True
    )


@pytest.mark.parametrize(
    ("checkpoint", "shape"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("meta-llama/Llama-3.3-70B-Instruct", "llama-3-70b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"), ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"), ("Qwen/Qwen3-32B", "qwen3-32b"),
    ],
)  # fmt: skip
def test_checkpoints_are_known_by_their_own_names(checkpoint: str, shape: str) -> None:
    assert model_name(checkpoint) == shape
