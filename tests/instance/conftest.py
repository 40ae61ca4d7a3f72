from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from world import World

from checkpoints import greedy, make_tiny

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("model"), **SHAPE)


@pytest.fixture(scope="session")
def world(checkpoint: Path) -> Iterator[World]:
    """Four instances for all tests. What a test kills it brings back."""
    four = World(checkpoint, 4, kv_cache_bytes=1 << 22)
    yield four
    four.close()


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> Callable[[list[int], int], tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities, by transformers."""
    return greedy(checkpoint)
