"""One tiny checkpoint, what transformers says to prompts, and instances of it that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.greedy_reference import GreedyReference
from tests.instance.instance_world import TOKEN_BYTES, World
from tests.instance.span_answers import Expected

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("model"), **SHAPE)


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> Expected:
    """Greedy tokens and their log-probabilities, by transformers."""
    return GreedyReference(checkpoint).answer


@pytest.fixture(scope="session")
def four_instances(checkpoint: Path) -> Iterator[World]:
    world = World(checkpoint, 4, kv_cache_bytes=1 << 22)
    yield world
    world.close()


@pytest.fixture
def world(four_instances: World) -> Iterator[World]:
    """Four instances for all tests. What a test kills it brings back; what a failed one leaves fails no other."""
    yield four_instances
    four_instances.recover()


@pytest.fixture(scope="session")
def trio(checkpoint: Path) -> Iterator[World]:
    """Two instances to prefill (0, 1) and one to decode (2), with room for 800 tokens each. What a test kills it brings
    back."""
    three = World(checkpoint, 3, kv_cache_bytes=800 * TOKEN_BYTES, scheduler={"max_num_batched_tokens": 32})
    yield three
    three.close()
