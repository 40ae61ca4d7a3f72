"""The least that a probe of benchmarks/peers could take by the machine's limits: arithmetic and reads, the slower."""

import json
from pathlib import Path

import pytest
from benchmarks.peers.vllm_engine import DECODES, Answer, Probe, least_s, limits, step_s

CONFIG = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 8,
    "intermediate_size": 1536, "vocab_size": 4096,
}  # fmt: skip
WEIGHTS = 8 * (512 * 64 * 2 * (8 + 2) + 3 * 512 * 1536) + 512 * 4096


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("batch", [1, 8])
def test_a_decode_step_is_bound_by_reads_or_by_its_rows_arithmetic(model: Path, batch: int) -> None:
    probe = Probe("", 1000, 32, batch, "step")
    read = (WEIGHTS + batch * 2 * 8 * 2 * 64 * 1016) * 4
    # Scores and weighted sums of 8 heads of 64 over 1,016 tokens in each of 8 layers.
    operations = batch * (2 * WEIGHTS + 8 * 4 * 8 * 64 * 1016)
    found = {"gflops_2048_rows": 1e9, "gflops_1_rows": 100.0, "gflops_8_rows": 100.0, "read_gb_s": 10.0}
    assert least_s(model, probe, found, 4) == pytest.approx(read / 10e9)
    found[f"gflops_{batch}_rows"] = 5.0
    assert least_s(model, probe, found, 4) == pytest.approx(operations / 5e9)
    assert operations / 5e9 > read / 10e9


def test_the_rate_of_each_measured_batch_is_known(model: Path) -> None:
    found = limits(model, "float32", 1)
    for past, batch in DECODES:
        assert least_s(model, Probe("", past, 32, batch, "step"), found, 4)


def test_a_step_of_a_batch_is_measured_while_all_decode() -> None:
    """The second prompt is computed while the first one decodes, 0.5 s a step; then both take 0.1 s a step."""
    first = [1.0 + 0.5 * i for i in range(4)] + [2.6 + 0.1 * i for i in range(20)]
    second = [2.6 + 0.1 * i for i in range(24)]
    assert step_s([Answer(0.0, first), Answer(0.0, second)]) == pytest.approx(0.1)
    with pytest.raises(RuntimeError, match="more tokens"):
        step_s([Answer(0.0, first[:6]), Answer(0.0, second)])
