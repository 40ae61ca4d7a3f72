"""Fits on files whose law is known: sizes that were not measured, the staircase, units, and what lies beyond."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.latency_fit import profile_files as files

from headway.core.errors import ConfigError
from headway.perf.hardware import ModelShape, ParallelLayout, model
from headway.perf.latency import device_fit
from headway.perf.latency.base import BatchLoad, PrefillCache, load_s, solve_tokens
from headway.perf.latency.device_fit import DeviceFit, EngineAssumptions
from headway.perf.latency.fitted import fitted
from headway_research.fit.operators import encode, fit_device
from headway_research.fit.readers import read_all


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> DeviceFit:
    folder = tmp_path_factory.mktemp("profiles")
    paths = [files.mlp_csv(folder), files.network_csv(folder), files.attention_csv(folder)]
    return fit_device("a100", read_all(paths), ["made by a test"], tolerance=0.0)


def test_held_out_counts_follow_the_staircase(fit: DeviceFit) -> None:
    assert fit.linear is not None
    rows = np.array([3.0, 20, 100, 127, 129, 130, 200, 257, 300, 900])
    truth = np.array([files.linear_ms(m, 4096, 28672) for m in rows])
    inside = rows <= 512
    error = np.abs(fit.linear.ms(rows, 4096, 28672) / truth - 1)
    assert error[inside].max() < 0.01
    assert error.max() < 0.15, "between coarse counts a step may fall anywhere"


def test_unseen_shape_by_roofline_and_residual(fit: DeviceFit) -> None:
    assert fit.linear is not None
    rows = np.array([1.0, 64, 128, 512, 2048])
    truth = np.array([files.linear_ms(m, 5120, 10240) for m in rows])
    assert np.abs(fit.linear.ms(rows, 5120, 10240) / truth - 1).mean() < 0.10


def test_attention_is_fitted_within_six_percent(fit: DeviceFit) -> None:
    latency = fitted("a100", "llama-3-8b", fit=fit)
    for chunk, past in ((48, 0), (200, 0), (700, 0), (100, 900), (300, 3000), (1500, 1500)):
        truth = 32e-3 * files.prefill_ms(chunk, past, 32)
        assert float(latency.chunk_s(past, chunk, chunk)[0]) == pytest.approx(truth, rel=0.06)
    for count, past in ((1, 100), (3, 700), (20, 3000), (64, 4096)):
        assert latency.decode_s(count, count * past) == pytest.approx(32e-3 * files.decode_ms(count, past, 8), rel=0.10)


def test_units_are_seconds(fit: DeviceFit) -> None:
    latency = fitted("a100", "llama-3-8b", fit=fit, assumptions=EngineAssumptions(host_s=0.0))
    layer = sum(files.linear_ms(512, k, n) for k, n in ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)))
    light = sum(files.light_ms(512, w) for w in (4096, 4096, 4096, 4096, 5120, 14336))
    row = float(latency.token_s(512, 512)[0])
    assert 32e-3 * (layer + light) == pytest.approx(row, rel=0.05)


def test_beyond_what_was_measured_is_finite_and_grows(fit: DeviceFit) -> None:
    for layout in (ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(tp=8, stages=2)):
        latency = fitted("a100", "llama-3-8b", layout, fit=fit)
        token = latency.token_s(0, 60_000)
        assert np.isfinite(token).all()
        assert (token >= 0).all()
        chunks = [float(latency.chunk_s(p, 512, 512)[0]) for p in (0, 1, 4096, 5000, 100_000, 10_000_000)]
        assert chunks == sorted(chunks)
        assert np.isfinite(chunks).all()
        decodes = [latency.decode_s(4, 4 * p) for p in (1, 100, 4096, 10_000, 1_000_000, 10_000_000)]
        assert decodes == sorted(decodes)
        assert np.isfinite(decodes).all()


@pytest.mark.parametrize("split", ["never", "beyond", "always"])
def test_history_is_continuous_at_the_knee(fit: DeviceFit, split: str) -> None:
    latency = fitted("a100", "llama-3-8b", fit=fit, assumptions=EngineAssumptions(split_kv=split))
    for chunk in (16, 512, 16384, 20_000):
        before, at, after = (float(latency.chunk_s(p, chunk, chunk)[0]) for p in (4095, 4096, 4097))
        assert before <= at <= after
        assert after - before < 1e-3 * at


def test_chunk_sizes_and_prefill_times_follow_from_a_fitted_model(fit: DeviceFit) -> None:
    latency = fitted("a100", "llama-3-8b", fit=fit)
    tokens, attention = solve_tokens(latency, BatchLoad(8, 8, 8000), 2000, 4096, 0.05)
    assert tokens > 0
    assert load_s(latency, BatchLoad(8, 8, 8000).with_chunk(tokens, attention)) <= 0.05
    cache = PrefillCache(latency, 0.05)
    totals = [cache.total_s(n) for n in (0, 100, 5000, 50_000)]
    assert totals == sorted(totals)
    assert totals[0] == 0.0


def test_source_without_attention_or_network_profiles_is_derived(tmp_path: Path) -> None:
    only = fit_device("a100", read_all([files.mlp_csv(tmp_path)]))
    latency = fitted("a100", "llama-3-8b", ParallelLayout(tp=2), fit=only)
    assert latency.source.status == "derived"
    families = latency.source.details["families"]
    assert families["prefill"].startswith("derived")
    assert families["decode"].startswith("derived")
    assert families["collectives"].startswith("derived")
    assert families["linear"].startswith("measured")


def test_a_fit_survives_its_file(fit: DeviceFit, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    path.write_bytes(encode(fit))
    assert device_fit.load(path) == fit
    path.write_text("{}")
    with pytest.raises(ConfigError, match="holds no operator fit"):
        device_fit.load(path)
    with pytest.raises(ConfigError, match="cannot read"):
        device_fit.load(tmp_path / "none.json")


def test_wrong_device_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no profile of h100-80gb among those read; they are of a100-80gb"):
        fit_device("h100", read_all([files.mlp_csv(tmp_path)]))


def test_head_dim_other_than_profiled_scales(fit: DeviceFit) -> None:
    wide = model("llama-3-8b")
    half = ModelShape(layers=32, hidden=4096, q_heads=32, kv_heads=8, head_dim=64, mlp=14336, vocab=128256)
    a, b = fitted("a100", wide, fit=fit), fitted("a100", half, fit=fit)
    assert float(b.chunk_s(0, 4096, 4096)[0]) == pytest.approx(0.5 * float(a.chunk_s(0, 4096, 4096)[0]))
    assert b.source.status != "measured"
