"""`headway profile --vllm`: refusals, and a real engine on this processor whose table its plug-in finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.perf.latency.table import TableLatency, load

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("model --vllm-command /bin/true", "name the `vllm` of an environment"),
        ("model --budget 0", "--budget must be above 0"),
        ("http://127.0.0.1:8000", "a server: its steps cannot be timed from outside"),
    ],
)
def test_what_cannot_be_profiled_is_refused(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--vllm", *words.split()]) != 0
    assert sentence in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM: make vllm")
def test_a_profile_of_a_real_engine_is_stored_and_its_plug_in_starts_from_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    script = [sys.executable, ROOT / "scripts" / "make_checkpoint.py", "--hidden", "64", "--layers", "2", "--heads"]
    script += ["2", "--kv-heads", "1", "--mlp", "128", "--vocab", "512", "--dtype", "float32", "--out", model]
    subprocess.run([str(word) for word in script], check=True, capture_output=True)
    variables = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT / "src"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-batched-tokens", "512"]
    line = [sys.executable, "-m", "headway.cli.main", "profile", "--vllm", str(model), "--vllm-command", str(VLLM)]
    done = subprocess.run([*line, "--budget", "10", *flags], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "headway" / "latency").glob("*.json")
    source = load(file, None)
    latency = TableLatency(source)
    assert source.validated_past > 0
    # A loaded machine may take longer for 8 rows than for 512.
    assert latency.rows_s(512) > 0.0
    assert latency.rows_s(8) > 0.0
    started = subprocess.run(
        [str(VLLM.with_name("python")), "-c", _START, str(model)],
        env=variables | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"starts from a stored profile, {source.provenance}" in started.stdout + started.stderr


_START = """
import sys
from vllm import LLM

LLM(
    sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=1024, skip_tokenizer_init=True,
    scheduler_cls="headway.vllm.Scheduler",
)
"""
"""Loads an engine with the plug-in, which logs where its latency model starts from."""
