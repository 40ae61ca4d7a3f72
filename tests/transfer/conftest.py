from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.instance_fixtures import checkpoint, expected
from tests.helpers.instance_world import World

__all__ = ["checkpoint", "expected"]


TOKEN_BYTES = 3 * 2 * 2 * 8 * 4


@pytest.fixture(scope="session")
def trio(checkpoint: Path) -> Iterator[World]:
    """Two instances to prefill (0, 1) and one to decode (2), with room for 800 tokens each. What a test kills it brings
    back."""
    three = World(checkpoint, 3, kv_cache_bytes=800 * TOKEN_BYTES, scheduler={"max_num_batched_tokens": 32})
    yield three
    three.close()
