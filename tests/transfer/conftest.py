from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from checkpoints import greedy, make_tiny
from instance.world import World

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8}
TOKEN_BYTES = 3 * 2 * 2 * 8 * 4


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("model"), **SHAPE)


@pytest.fixture(scope="session")
def trio(checkpoint: Path) -> Iterator[World]:
    """Two instances to prefill (0, 1) and one to decode (2), with room for 800 tokens each. What a test kills it brings
    back."""
    three = World(
        checkpoint, 3, kv_cache_bytes=800 * TOKEN_BYTES, scheduler={"max_num_batched_tokens": 32, "reserve_tokens": 0}
    )
    yield three
    three.close()


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> Callable[[list[int], int], tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities, by transformers."""
    return greedy(checkpoint)
