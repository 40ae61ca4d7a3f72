"""`headway accel`: what it prints and writes, its exit status, and its errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.refusals import refusal

from headway.cli.main import main
from headway_research.accelerator.stage_figures import FIGURES, setting, stage

EXAMPLES = Path(__file__).parents[2] / "examples" / "accel"


def written(words: list[str], path: Path) -> dict[str, Any]:
    assert main(["accel", *words, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


LAYER_US: dict[tuple[int, int], tuple[float, float, float, float]] = {
    (2048, 128): (805.75, 521.73, 1176.11, 870.50),
    (2048, 64): (805.75, 358.05, 1012.43, 860.90),
    (1024, 128): (383.69, 521.73, 754.06, 526.85),
    (1024, 64): (383.69, 358.05, 590.38, 438.84),
    (512, 16): (199.17, 235.29, 270.97, 237.85),
}
"""(prefill tokens, KV Ki tokens): a layer's microseconds for prefill and decode alone, packed, packed with prefetch."""
SPEEDUPS: dict[int, tuple[float, float]] = {
    0: (1.73, 1.26),
    64: (2.13, 1.34),
    128: (2.81, 1.45),
    192: (4.14, 1.58),
    256: (6.49, 1.69),
    512: (6.49, 1.69),
}
"""Prefetch buffer, MiB: decode and overall speed-up at 1024 prefill and 64K KV tokens."""


def test_the_papers_thirteen_printed_stage_figures_come_out_within_a_hundredth() -> None:
    assert len(FIGURES) == 13
    for figure in FIGURES:
        assert figure.ours("paper") == pytest.approx(figure.paper, rel=0.01), figure.claim


@pytest.mark.parametrize("work", LAYER_US)
def test_times_of_a_layer_stay(work: tuple[int, int]) -> None:
    found, layers = stage("paper", *work), setting("paper").shape.layers
    seconds = (found.prefill_s, found.decode_s, found.total_s("packing"), found.total_s("prefetch"))
    assert [each * 1e6 / layers for each in seconds] == pytest.approx(LAYER_US[work], rel=0.005)


@pytest.mark.parametrize("buffer_mib", SPEEDUPS)
def test_speedups_over_the_buffer_stay(buffer_mib: int) -> None:
    found = stage("paper", 1024, 64, buffer_mib)
    speedups = found.decode_speedup("prefetch"), found.overall_speedup("prefetch")
    assert speedups == pytest.approx(SPEEDUPS[buffer_mib], rel=0.01)


def test_the_schema_of_a_file_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accel", "stage", "--schema"]) == 0
    assert {"machine", "stage", "serve"} <= set(json.loads(capsys.readouterr().out)["properties"])


def test_a_stage_in_tables_json_csv_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["stage", str(EXAMPLES / "stage.yaml"), "--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.svg")]
    data = written(words, tmp_path / "a.json")
    assert "smallest buffer that hides all KV traffic" in capsys.readouterr().out
    assert data["schema"] == "headway.accel.stage/1"
    assert data["setting"]["assumptions"]["preset"] == "default"
    assert data["figures"]["prefetch_ms"] < data["figures"]["packing_ms"] < data["figures"]["serial_ms"]
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [row["operator"] for row in rows][-1] == "decode attention"
    assert (tmp_path / "a.svg").stat().st_size > 5000


def test_a_sweep_marks_its_front(tmp_path: Path) -> None:
    words = ["sweep", "--axis", "machine.prefetch_buffer=0,64M,256M,512M", "--axis", "stage.kv_tokens=32K,64K"]
    words += ["--set", "assumptions.preset=paper", "--plot", str(tmp_path / "a.png")]
    data = written(words, tmp_path / "a.json")
    front = [(row["machine.prefetch_buffer"], row["stage.kv_tokens"]) for row in data["rows"] if row["pareto"]]
    assert front == [(0, "32K"), (0, "64K"), ("64M", "32K"), ("64M", "64K"), ("256M", "32K"), ("256M", "64K")]
    by_size = [row["prefetch_overall_speedup"] for row in data["rows"] if row["stage.kv_tokens"] == "64K"]
    assert by_size == pytest.approx([1.256, 1.344, 1.690, 1.690], abs=0.001)


def test_serving_and_capacity_are_estimated(tmp_path: Path) -> None:
    small = ["--set", "serve.requests=40", "--set", "serve.workload.preset=sharegpt-like"]
    served = written(["serve", *small, "--qps", "2"], tmp_path / "a.json")
    assert set(served["runs"]) == {"packing", "prefetch"}
    assert all(run["rate"]["finished"] == 40 for run in served["runs"].values())
    again = written(["serve", *small, "--qps", "2"], tmp_path / "b.json")
    assert again == served
    words = ["capacity", *small, "--ratio", "1.2", "--plot", str(tmp_path / "c.png"), "--csv", str(tmp_path / "c.csv")]
    found = written(words, tmp_path / "c.json")
    rates = list(csv.DictReader((tmp_path / "c.csv").read_text().splitlines()))
    assert [float(rate["qps"]) for rate in rates] == [
        rate["qps"] for mode in ("packing", "prefetch") for rate in found["modes"][mode]["tried"]
    ]
    assert found["schema"] == "headway.accel.capacity/1"
    assert found["modes"]["prefetch"]["qps"] > 0.5


def test_a_hugging_face_config_quantised_kv_and_other_machines(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
              "intermediate_size": 14336, "vocab_size": 128256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.yaml").write_text("model: .\nmachine: h200-like\nprecision: {kv: int4}\n")
    named = written(["stage", "--set", "machine=h200", "--set", "precision.kv=int4"], tmp_path / "a.json")
    by_config = written(["stage", str(tmp_path / "run.yaml")], tmp_path / "b.json")
    assert by_config["figures"] == named["figures"]
    plain = written(["stage", "--set", "machine=h200"], tmp_path / "c.json")
    assert named["figures"]["kv_layer_mib"] == pytest.approx(plain["figures"]["kv_layer_mib"] * 0.53125 / 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stage", "--set", "machine.preset=tpuv9"], "machine.preset: unknown machine 'tpuv9'; known: tpuv6e-like"),
        (["stage", "--set", "machine.buffer=1G"], "machine.buffer is not a field; allowed here: preset, rows"),
        (["stage", "--set", "machine.prefetch_buffer=lots"], "machine.prefetch_buffer: 'lots' is not a size"),
        (["stage", "--set", "model=gpt-9"], "model: unknown model 'gpt-9'"),
        (["stage", "--set", "stage.kv_tokens=7"], "stage.kv_tokens must be at least 1 a decode (32), not 7"),
        (["stage", "--set", "precision.kv=fp6"], "precision.kv must be one of fp32, fp16"),
        (["stage", "--set", "assumptions.ffn_matrices=4"], "assumptions.ffn_matrices must be 2, 3 or null"),
        (["stage", "--set", "assumptions=guess"], "assumptions.preset must be one of default, paper"),
        (["stage", "--set", "techniques.fusion=max"], "techniques.fusion must be auto or off"),
        (["stage", "--set", "machine.compute_buffer=4K"], "machine.compute_buffer of 0.00390625 MiB cannot hold"),
        (["sweep"], "--axis: give at least one"),
        (["serve", "--qps", "0"], "--qps must be above 0"),
        (["serve", "--set", "serve.policy.policy=luck"], "serve.policy: unknown scheduling policy 'luck'"),
        (["capacity", "--ratio", "1"], "--ratio must be above 1"),
    ],
)
def test_error_of_bad_input_names_the_field(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(["accel", *words], capsys)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_are_read(file: Path, tmp_path: Path) -> None:
    assert written(["stage", str(file)], tmp_path / "a.json")["figures"]["prefetch_ms"] > 0
