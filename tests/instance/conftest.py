from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.instance_fixtures import checkpoint, expected
from tests.helpers.instance_world import World

__all__ = ["checkpoint", "expected"]


@pytest.fixture(scope="session")
def world(checkpoint: Path) -> Iterator[World]:
    """Four instances for all tests. What a test kills it brings back."""
    four = World(checkpoint, 4, kv_cache_bytes=1 << 22)
    yield four
    four.close()
