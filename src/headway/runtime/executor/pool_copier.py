"""Copies of KV blocks between a worker's pool and memory, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.kv.block_allocator import joined_runs
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.kv_spill.files import Rows


class PoolCopier:
    """Implements `runtime.kv_spill.block_copier.BlockCopier`. A row is (layers, 2, kv_heads, tokens, head_dim)."""

    def __init__(self, pool: KvPool, block_tokens: int) -> None:
        self._pool, self._block = pool, block_tokens
        self._shape = (pool.layers, 2, pool.kv_heads, block_tokens, pool.head_dim)
        self.dtype = str(pool.dtype).removeprefix("torch.")
        self.block_bytes = pool.nbytes // pool.slots * block_tokens

    def take(self, blocks: Sequence[int]) -> Rows:
        """See `BlockCopier`."""
        rows = torch.empty((len(blocks), *self._shape), dtype=self._pool.dtype)
        at = 0
        for first, count in joined_runs(blocks):
            rows[at : at + count].copy_(self._view(first, count))
            at += count
        return rows.view(len(blocks), -1).view(torch.uint8).numpy()

    def put(self, blocks: Sequence[int], rows: Rows) -> None:
        """See `BlockCopier`."""
        data = torch.from_numpy(rows).view(self._pool.dtype).view(len(blocks), *self._shape)
        at = 0
        for first, count in joined_runs(blocks):
            self._view(first, count).copy_(data[at : at + count])
            at += count

    def _view(self, first: int, count: int) -> Tensor:
        """Return a run of blocks without a copy, blocks first."""
        slots = self._pool.data[:, :, :, first * self._block : (first + count) * self._block]
        layers, two, heads, tokens, dim = self._shape
        return slots.view(layers, two, heads, count, tokens, dim).permute(3, 0, 1, 2, 4, 5)
