"""Partial answers of a ring, whichever rows they are for and in whatever order they come."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headway.runtime.attention.backend import attend, merge, merge_into
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.sequence_parallel.attention import KvShard, _PartialAnswer
from headway.runtime.sequence_parallel.schedule import mask_blocks


def test_merging_in_place_equals_merging() -> None:
    torch.manual_seed(0)
    outs, lses = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40) * 20
    lses[0, :, 5:9] = -torch.inf
    outs[0, :, 5:9] = 0.0
    out, lse = merge(list(outs), list(lses))
    mine = outs[0].clone(), lses[0].clone()
    merge_into(*mine, outs[1], lses[1])
    assert torch.allclose(mine[0], out, atol=1e-6)
    assert torch.allclose(mine[1], lse)


@pytest.mark.parametrize("seed", range(12))
def test_blocks_may_come_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    tokens, past = chance.randrange(8, 50), chance.randrange(0, 9)
    mine = np.sort(np.array(chance.sample(range(tokens), chance.randrange(1, tokens)), dtype=np.int64))
    others = np.setdiff1d(np.arange(tokens), mine)
    parts = [
        (mask_blocks(mine, mine, past), past + len(mine), 0),
        (mask_blocks(mine, others, 0), len(others), past + len(mine)),
    ]
    keys = torch.randn(2, 2, past + tokens, 8)
    blocks = [(block, keys[:, :, at : at + size]) for found, size, at in parts for block in found]
    chance.shuffle(blocks)
    query = torch.randn(4, len(mine), 8)
    answer = _PartialAnswer(query)
    for block, held in blocks:
        answer.add(block, held)
    places = np.concatenate([np.full(past, -1), mine, others])
    for row, position in enumerate(mine):
        seen = torch.from_numpy(np.flatnonzero(places <= position))
        out, _ = attend(query[:, row : row + 1], keys[0][:, seen], keys[1][:, seen], False)
        assert torch.allclose(answer.out[:, row : row + 1], out, atol=1e-5)


def test_a_shard_that_grows_joins_what_is_adjacent() -> None:
    pool = KvPool(1, 2, 40, 4, torch.float32)
    shard = KvShard(pool, [(0, 8)])
    shard.extend([(8, 8), (24, 4)])
    shard.extend([(28, 4)])
    assert (shard.slot_ranges, shard.capacity) == (((0, 16), (24, 8)), 24)
    narrow = KvShard(pool.narrowed(1), ())
    narrow.extend(pool.narrow_ranges(1, [(4, 4), (20, 2)]))
    k, v = torch.randn(2, 12, 1, 4)
    narrow.store(0, 0, k, v)
    assert torch.equal(narrow.block(0, 12), torch.stack([k, v]).transpose(1, 2))
    rows = torch.cat(
        [pool.data[0, 0, head, 4:8] for head in (0, 1)] + [pool.data[0, 0, head, 20:22] for head in (0, 1)]
    )
    assert torch.equal(rows, k.squeeze(1))
