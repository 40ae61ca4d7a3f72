"""Layouts that cannot be are refused before anything starts, with the numbers and with neighbours that can be."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.checkpoints import FAMILIES, make_tiny

from headway.core.errors import ConfigError
from headway.core.files import read_json
from headway.perf.hardware import ParallelLayout
from headway.runtime import embedded
from headway.runtime.assembly import engine as many_processes
from headway.runtime.engine.config import EngineConfig
from headway.runtime.executor.profiling import check_memory, check_shape, need, parameters
from headway.runtime.model.config import DecoderConfig, read_config
from headway.runtime.model.loading import load_decoder

PATH = embedded.model_path() / "config.json"
EMBEDDED = read_config(read_json(PATH), None, str(PATH))
GIB = 1 << 30


def config_of(layers: int, kv_heads: int, group: int) -> DecoderConfig:
    return dataclasses.replace(EMBEDDED, layers=layers, kv_heads=kv_heads, q_heads=kv_heads * group)


CONFIGS = st.builds(config_of, st.integers(1, 12), st.integers(1, 8), st.integers(1, 8))
LAYOUTS = st.builds(
    lambda tp, stages, kvp: ParallelLayout(tp=tp, stages=stages, kvp=kvp),
    st.integers(1, 12), st.integers(1, 16), st.integers(1, 3),
)  # fmt: skip


def suggested(error: ConfigError) -> list[ParallelLayout]:
    found = re.findall(r"(\d+) x (\d+) x (\d+)", str(error))
    return [ParallelLayout(tp=int(tp), stages=int(stages), kvp=int(kvp)) for tp, stages, kvp in found]


def steps(one: ParallelLayout, other: ParallelLayout) -> int:
    return abs(one.tp - other.tp) + abs(one.stages - other.stages) + abs(one.kvp - other.kvp)


def can_be(config: DecoderConfig, layout: ParallelLayout) -> bool:
    try:
        check_shape(config, layout)
    except ConfigError:
        return False
    return True


@given(CONFIGS, LAYOUTS)
def test_a_suggested_layout_is_possible_and_the_nearest_one(config: DecoderConfig, asked: ParallelLayout) -> None:
    heads = config.q_heads % asked.tp == 0 and (config.kv_heads % asked.tp == 0 or asked.tp % config.kv_heads == 0)
    if heads and asked.stages <= config.layers:
        check_shape(config, asked)
        return
    with pytest.raises(ConfigError, match="cannot") as refused:
        check_shape(config, asked)
    near = suggested(refused.value)
    assert near
    assert all(can_be(config, layout) for layout in near)
    distances = [steps(asked, layout) for layout in near]
    assert distances == sorted(distances)
    nearer = (
        ParallelLayout(tp=tp, stages=stages, kvp=kvp)
        for tp in range(1, 25)
        for stages in range(1, 33)
        for kvp in range(1, 7)
        if abs(tp - asked.tp) + abs(stages - asked.stages) + abs(kvp - asked.kvp) < distances[0]
    )
    assert not any(can_be(config, layout) for layout in nearer)


@given(LAYOUTS, st.integers(1, 1 << 20), st.integers(1, 4 * GIB), st.none() | st.integers(1, 4 * GIB))
def test_memory_counts_weights_processes_and_one_request(
    asked: ParallelLayout, tokens: int, available: int, kv_bytes: int | None
) -> None:
    if not can_be(EMBEDDED, asked):
        return
    takes = need(EMBEDDED, asked, 2)
    cache = takes.kv_per_token * tokens
    fits = takes.weights + takes.processes + max(cache, kv_bytes or 0) <= available and cache <= (kv_bytes or cache)
    if fits:
        check_memory(EMBEDDED, asked, 2, available, kv_bytes, tokens)
        return
    with pytest.raises(ConfigError) as refused:
        check_memory(EMBEDDED, asked, 2, available, kv_bytes, tokens)
    for layout in suggested(refused.value):
        check_shape(EMBEDDED, layout)
        check_memory(EMBEDDED, layout, 2, available, kv_bytes, tokens)


HEADS = (
    "4 query heads and 2 KV heads cannot be cut evenly over --tensor-parallel-size 3: nearest that can be "
    "(tensor x pipeline x KV parallel size): 4 x 1 x 1, 2 x 1 x 1, 2 x 2 x 1"
)
STAGES = (
    "2 layers cannot make --pipeline-parallel-size 9 stages: nearest that can be "
    "(tensor x pipeline x KV parallel size): 1 x 2 x 1, 2 x 2 x 1, 1 x 1 x 1"
)
MEMORY = (
    "tp2-pp1-kvp1 needs 1.3 GiB: 5.5 MiB of weights, 320.0 MiB for 2 processes and 1.0 GiB of KV cache "
    "(one request of 1048576 tokens takes 1.0 GiB); 1.0 GiB is available."
)
CACHE = (
    "one request of 60000 tokens needs 58.6 MiB of KV cache (1024 bytes a token over 2 workers) "
    "and --kv-cache-memory gives 1.0 MiB: give it more or lower --max-model-len"
)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tensor_parallel_size": 3}, HEADS),
        ({"pipeline_parallel_size": 9}, STAGES),
        ({"tensor_parallel_size": 2, "max_model_len": 1 << 20}, MEMORY),
        ({"pipeline_parallel_size": 2, "max_model_len": 60_000, "kv_cache_bytes": 1 << 20}, CACHE),
    ],
)
def test_layouts_that_the_embedded_model_cannot_have_are_refused(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, int], words: str
) -> None:
    monkeypatch.setattr(many_processes, "available_bytes", lambda: GIB)
    config = EngineConfig(model=str(embedded.model_path()), **asked)
    layout = ParallelLayout(tp=config.tensor_parallel_size, stages=config.pipeline_parallel_size)
    with pytest.raises(ConfigError) as refused:
        many_processes.build_many(config, layout)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_of_many_ranks_reports_the_models_parameter_count(family: str, tmp_path: Path) -> None:
    """Not those that ranks hold twice: instances of one model, however cut, are known by it."""
    folder = make_tiny(family, tmp_path)
    config = read_config(read_json(folder / "config.json"), None, family)
    assert parameters(config) == load_decoder(folder, "float32").weights.parameters
