from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.instance_fixtures import checkpoint, expected
from tests.helpers.instance_world import World

__all__ = ["checkpoint", "expected"]


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
