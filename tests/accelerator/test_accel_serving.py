"""The latency model that the scheduler asks is the stage model; capacity uses the real scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.accelerator.accel_cases import study

from headway.core.errors import ConfigError
from headway.perf.latency.base import BatchLoad, load_s, solve_tokens
from headway_research.accelerator.machine import IterationWork
from headway_research.accelerator.service_figures import requests
from headway_research.accelerator.serving import (
    AcceleratorLatency,
    ServiceLimits,
    at_rate,
    bandwidth_to_match,
    capacity,
    instance,
    kv_capacity,
    sarathi,
)
from headway_research.accelerator.stage import Mode, evaluate

MODELS = {(p, m): AcceleratorLatency(study(p), m) for p in ("paper", "default") for m in ("packing", "prefetch")}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(("paper", "default")), st.sampled_from(("packing", "prefetch")), st.integers(0, 4000),
    st.integers(0, 60_000), st.integers(0, 128), st.integers(1, 4000),
)  # fmt: skip
def test_batch_time_equals_the_stage_time(
    preset: str, mode: Mode, chunk: int, past: int, decodes: int, each: int
) -> None:
    if not chunk and not decodes:
        return
    model, work = MODELS[preset, mode], IterationWork(
        prefill_tokens=chunk, prefill_past=past if chunk else 0, decodes=decodes, kv_tokens=decodes * each
    )  # fmt: skip
    load = BatchLoad(decodes, decodes, decodes * each)
    if chunk:
        load = load.with_chunk(chunk, model.attention_s(past, chunk), past)
    expected = getattr(evaluate(study(preset), work), mode).total_s
    assert load_s(model, load) == pytest.approx(expected, rel=1e-12 if preset == "paper" else 0.01)


@pytest.mark.parametrize("preset", ["paper", "default"])
def test_scalar_equals_vector_attention_and_separable_terms_bound_the_whole(preset: str) -> None:
    model = MODELS[preset, "prefetch"]
    for past in (0, 1, 777, 50_000):
        vector = model.chunk_s(past, 0, 3000)
        assert [model.attention_s(past, c) for c in (0, 1, 100, 3000)] == pytest.approx(vector[[0, 1, 100, 3000]])
        assert np.all(np.diff(vector) >= -1e-12)
    for rows in (100, 700, 2000):
        load = BatchLoad(rows, 64, 64 * 2000).with_chunk(512, model.attention_s(900, 512), 900)
        padded = 128 if preset == "paper" else 0
        terms = float(model.token_s(load.tokens + padded, load.tokens + padded)[0])
        assert load_s(model, load) <= terms + model.decode_s(64, 64 * 2000) + load.chunk_s + 1e-12


def test_adaptive_chunks_use_the_whole_batch_and_keep_its_time() -> None:
    packing, prefetch = MODELS["default", "packing"], MODELS["default", "prefetch"]
    load = BatchLoad(32, 32, 100_000)
    sizes = []
    for model in (packing, prefetch):
        tokens, attention_s = solve_tokens(model, load, 2000, 8192, 0.030)
        assert load_s(model, load.with_chunk(tokens, attention_s, 2000)) <= 0.030
        over = load.with_chunk(tokens + 1, model.attention_s(2000, tokens + 1), 2000)
        assert load_s(model, over) > 0.030
        sizes.append(tokens)
    assert sizes[1] > 1.2 * sizes[0]  # KV that is prefetched leaves its time to the chunk
    assert solve_tokens(packing, load, 2000, 8192, 1e-6) == (0, 0.0)


def test_a_scheduler_always_packs() -> None:
    with pytest.raises(ConfigError, match="packing or prefetch"):
        AcceleratorLatency(study(), "serial")


def test_limits_hold_at_the_capacity_found_and_prefetch_raises_it() -> None:
    setting, drawn = study("paper"), requests("arxiv", 60, 0)
    limits, found = ServiceLimits(tbt_s=0.0167), {}
    for mode in ("packing", "prefetch"):
        spec = instance(setting, mode, sarathi(512), 131072)
        answer = capacity(spec, lambda qps: at_rate(drawn, qps), limits, ratio=1.1)
        assert {rate.qps: rate.ok for rate in answer.tried}[answer.qps]
        assert any(answer.qps < rate.qps <= answer.qps * 1.1 * (1 + 1e-9) and not rate.ok for rate in answer.tried)
        found[mode] = answer.qps
    assert found["prefetch"] > found["packing"]
    draw = lambda qps: at_rate(drawn, qps)  # noqa: E731
    times = bandwidth_to_match(setting, sarathi(512), 131072, draw, limits, found["prefetch"], ratio=1.1)
    assert times is not None
    assert 1.0 < times < 2.0


def test_kv_is_what_hbm_leaves_and_a_model_that_does_not_fit_is_refused() -> None:
    assert 130_000 < kv_capacity(study("default")) < 160_000
    with pytest.raises(ConfigError, match=r"machine.hbm_capacity: .* cannot hold the model's"):
        kv_capacity(study("default", "llama-3.1-70b"))
