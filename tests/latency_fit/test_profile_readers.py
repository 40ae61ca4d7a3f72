"""Profile formats are told by their columns, converted to one rank's shapes, and refused in words when broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.latency_fit import profile_files as files

from headway.core.errors import ConfigError
from headway_research.fit.readers import COLLECTIVE, DECODE, ELEMENTWISE, LINEAR, PREFILL, read


def test_vidur_layer_gives_shapes_of_one_rank(tmp_path: Path) -> None:
    profiles = {(p.op, p.group): p for p in read(files.mlp_csv(tmp_path))}
    up = profiles["mlp_up_proj", "model/tp2"]
    assert (up.family, up.device, up.source) == (LINEAR, "a100-80gb", "vidur")
    assert set(up.x["k"]) == {4096}
    assert set(up.x["n"]) == {14336}
    assert profiles["attn_pre_proj", "model/tp2"].x["n"][0] == 3072
    assert profiles["mlp_act", "model/tp1"].family == ELEMENTWISE
    assert up.ms[0] == pytest.approx(files.linear_ms(1, 4096, 14336))


def test_vidur_network_knows_nodes(tmp_path: Path) -> None:
    (profile,) = read(files.network_csv(tmp_path))
    assert (profile.family, profile.op, profile.source) == (COLLECTIVE, "all_reduce", "vidur-a100_dgx")
    assert not profile.x["across"].any()


def test_frontier_file_holds_both_kinds(tmp_path: Path) -> None:
    prefill, decode = read(files.attention_csv(tmp_path))
    assert (prefill.family, decode.family) == (PREFILL, DECODE)
    assert len(prefill) == 40
    assert len(decode) == 42


def test_files_of_aiconfigurator_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs headway[fit]")
    (gemm,) = read(files.gemm_parquet(tmp_path))
    assert (gemm.op, gemm.source, len(gemm)) == ("gemm", "vllm-0.1", 20)
    (decode,) = read(files.generation_parquet(tmp_path))
    assert decode.family == DECODE
    assert len(decode) == 19, "fp8 caches are left out"
    (reduce,) = read(files.nccl_parquet(tmp_path))
    assert reduce.x["bytes"][0] == 1024, "message sizes count elements"


def test_repeated_points_become_their_median(tmp_path: Path) -> None:
    path = files.mlp_csv(tmp_path, tokens=(16, 16, 16, 32))
    for profile in read(path):
        assert len(profile) == 2


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "x,y\n1,2\n", "no profile that Headway knows; it has columns x, y"),
        ("a.csv", "", "is empty"),
        ("a.csv", "x,y\n", "no rows"),
        ("a.csv", "x,y\n1\n", "line 2 has 1 fields"),
        ("a.txt", "x", "profiles are .csv"),
        ("a.csv.gz", "not gzip", "cannot read"),
        ("a.parquet", "not parquet", "a.parquet"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read(path)


def test_missing_and_wrong_columns_are_named(tmp_path: Path) -> None:
    header = ["num_tokens", "num_tensor_parallel_workers", "n_head", "n_kv_head", "n_expanded_embd"]
    path = files.write_csv(tmp_path / "a100" / "mlp.csv", header, [[1, 1, 32, 8, 100]])
    with pytest.raises(ConfigError, match="no column 'n_embd'"):
        read(path)
    header = ["num_tokens", "num_tensor_parallel_workers", "n_head", "n_kv_head", "n_embd", "n_expanded_embd"]
    path = files.write_csv(tmp_path / "a100" / "mlp.csv", header, [["many", 1, 32, 8, 100, 100]])
    with pytest.raises(ConfigError, match="'num_tokens' is not a number"):
        read(path)


def test_unknown_device_error_names_the_device_option(tmp_path: Path) -> None:
    path = files.mlp_csv(tmp_path, device="mystery")
    with pytest.raises(ConfigError, match="--device"):
        read(path)
    assert read(path, "h100-80gb")[0].device == "h100-80gb"


def test_a_fit_does_not_depend_on_row_order(tmp_path: Path) -> None:
    there = read(files.mlp_csv(tmp_path / "1"))
    back = read(files.mlp_csv(tmp_path / "2", tokens=files.TOKENS[::-1]))
    for a, b in zip(there, back, strict=True):
        assert np.array_equal(a.ms, b.ms)
        assert np.array_equal(next(iter(a.x.values())), next(iter(b.x.values())))
