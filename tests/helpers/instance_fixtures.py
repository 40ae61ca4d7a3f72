"""What tests with instance processes share: one tiny checkpoint, and what transformers says to prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.greedy_reference import GreedyReference

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("model"), **SHAPE)


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> Callable[[list[int], int], tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities, by transformers."""
    return GreedyReference(checkpoint).answer
