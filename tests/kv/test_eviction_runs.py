"""Room made by eviction lies side by side: every run of blocks costs attention a call of its own."""

from __future__ import annotations

import random

import pytest

from headway.kv.allocator import BlockAllocator
from headway.kv.block_manager import BlockManager
from headway.kv.prefix_cache import PrefixCache

BLOCK = 4


@pytest.mark.parametrize("seed", range(4))
def test_prompts_that_share_nothing_lie_in_few_runs(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(BLOCK)
    manager = BlockManager(400 * BLOCK, BLOCK, cache)
    runs: list[int] = []
    for i in range(200):
        name, blocks, grown = f"r{i}", rng.randrange(10, 60), rng.randrange(6)
        cache.register(name, [(i, k) for k in range(blocks + grown)], blocks * BLOCK + 1)
        lease = manager.reserve(name, blocks * BLOCK)
        assert lease is not None
        for more in range(grown):
            assert manager.grow(lease, (blocks + more + 1) * BLOCK)
        manager.check()
        manager.note_computed(name, (blocks + grown) * BLOCK)
        runs.append(len(manager.where(name)))
        manager.free(lease)
        cache.forget(name)
    assert sum(runs) / len(runs) < 2.5


def test_a_run_to_extend_begins_behind_it_or_leaves_room() -> None:
    allocator = BlockAllocator(20)
    assert allocator.allocate(16) == [(0, 16)]
    allocator.release([(4, 2)])
    assert allocator.free_runs() == ((4, 2), (16, 4))
    assert allocator.has_run(4)
    assert not allocator.has_run(5)
    assert allocator.has_run(2, 4)
    assert not allocator.has_run(4, 4)
    assert allocator.has_run(3, 4)
