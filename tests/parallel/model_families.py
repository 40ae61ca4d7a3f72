"""Tiny random checkpoints of five families, layouts by name, and what a single process and transformers say."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.helpers.checkpoints import make_tiny
from tests.helpers.greedy_reference import prompt_of
from tests.parallel.rank_serving import Ask, greedy, make_core, serve

from headway.core.logs import EventSink
from headway.perf.hardware import ParallelLayout
from headway.runtime.assembly.single_process import SingleProcessExecutor
from headway.runtime.engine.core import EngineCore
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.executor.worker import ModelWorker
from headway.runtime.model.loading import load_decoder

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
CHUNKINGS = ("adaptive", "static:1", "static:7", "static:64")
BLOCKS, BLOCK = 64, 8
LAYERS = 5
"""Four stages of unequal size."""

_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"tie_word_embeddings": True},
}


def layout_of(name: str) -> ParallelLayout:
    """T2S4K2: tensor, pipeline and KV parallelism; what is not named is 1."""
    degrees = {letter: int(count) for letter, count in re.findall(r"([TSK])(\d+)", name)}
    assert "".join(f"{letter}{count}" for letter, count in degrees.items()) == name
    return ParallelLayout(tp=degrees.get("T", 1), stages=degrees.get("S", 1), kvp=degrees.get("K", 1))


@functools.cache
def checkpoint(family: str, dtype: str = "float32") -> Path:
    folder = tempfile.mkdtemp(prefix="headway-tiny-")
    return make_tiny(family, folder, dtype=dtype, num_hidden_layers=LAYERS, **_EXTRA.get(family, {}))


@functools.cache
def expected(family: str, seed: int, length: int, count: int) -> list[int]:
    """By transformers, in fp32."""
    return greedy(checkpoint(family), prompt_of(seed, length), count)


def single(folder: Path, asks: list[Ask], blocks: int = BLOCKS, **scheduler: Any) -> list[list[int]]:
    """By this engine, in one process."""
    executor = SingleProcessExecutor(ModelWorker(load_decoder(folder), blocks, BLOCK, ()))
    return serve(make_core(executor, blocks, BLOCK, **scheduler), asks)


def core_of(
    executor: MultiProcessExecutor, shard_tokens: int = 64, log: EventSink | None = None, **scheduler: Any
) -> EngineCore:
    """An engine over the ranks of a layout. `shard_tokens`: what a KV group holds of one request."""
    layout = executor.layout
    fields = {"stages": layout.stages, "kv_parallel": layout.kvp, "kv_shard_tokens": shard_tokens, **scheduler}
    return make_core(executor, BLOCKS, BLOCK, log, **fields)
