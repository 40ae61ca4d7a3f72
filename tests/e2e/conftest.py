"""Checkpoints and reference answers, made once for all tests with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.greedy_reference import GreedyReference


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a context of 4,096 tokens."""
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=4096)


@pytest.fixture(scope="session")
def short_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a context of 2,048 tokens."""
    return make_tiny("llama", tmp_path_factory.mktemp("short-llama"), max_position_embeddings=2048)


@pytest.fixture(scope="session")
def reference(llama: Path) -> GreedyReference:
    """Greedy answers of `llama`. Its weights do not depend on the context's length, so they are `short_llama`'s too."""
    return GreedyReference(llama)
