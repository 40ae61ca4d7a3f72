"""All decodes of one layer in one call of the compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.native import TILE, CompiledKernels

Runs = Sequence[tuple[int, int]]


class NativeDecodes:
    """Arguments of `headway_decode` for one iteration's decodes. Holds the pointers' owners alive.

    rows: the decodes' rows in the batch. shards: each request's visible slot ranges (first, count), ending with the
    slot of its new token.
    """

    def __init__(self, kernels: CompiledKernels, rows: Sequence[int], shards: Sequence[Runs], pool: KvPool) -> None:
        self._kernels = kernels
        self._pool = pool
        tiles: list[int] = []
        edges = [0]
        for slot_ranges in shards:
            for first, count in slot_ranges:
                # A tile never crosses a range, so that its slots are contiguous: the kernel reads it with one pointer.
                for done in range(0, count, TILE):
                    tiles += (first + done, min(TILE, count - done))
            edges.append(len(tiles) // 2)
        # The new token's slot is the last visible one; the kernel writes there before it reads.
        last = [slot_ranges[-1][0] + slot_ranges[-1][1] - 1 for slot_ranges in shards]
        # One int64 table in the order rows, slots, edges (count + 1), tiles (first, tokens); addresses below are byte
        # offsets.
        self._table = np.array([*rows, *last, *edges, *tiles], dtype=np.int64)
        self._count = count_of = len(shards)
        base = self._table.ctypes.data
        self._rows, self._slots = base, base + 8 * count_of
        self._edges, self._tiles = base + 16 * count_of, base + 8 * (3 * count_of + 1)
        self._base, self._stride = pool.data.data_ptr(), pool.slots * pool.head_dim
        self._tile_count = edges[-1]
        self._scratch: Tensor | None = None
        self._scratch_at = 0

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store the decodes' keys and values and write their rows of out (T, q_heads, dim). Others stay untouched."""
        _, q_heads, dim = q.shape
        kv_heads = k.shape[1]
        self._prepare(q_heads, kv_heads, dim)
        plane = 2 * kv_heads * self._stride
        keys = self._base + 2 * plane * layer
        self._kernels.decode(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), q.stride(0), k.stride(0), keys, keys + plane,
            self._stride, self._rows, self._slots, self._count, self._tiles, self._edges, q_heads, kv_heads, dim,
            dim**-0.5, self._scratch_at, 0,
        )  # fmt: skip

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor) -> None:
        """Write partial answers: the decodes' rows of out (T, q_heads, dim) and lse (T, q_heads), both fp32.

        Stores nothing: all keys and values are in the pool already.
        """
        _, q_heads, dim = q.shape
        kv_heads = self._pool.kv_heads
        self._prepare(q_heads, kv_heads, dim)
        plane = 2 * kv_heads * self._stride
        keys = self._base + 2 * plane * layer
        self._kernels.decode(
            q.data_ptr(), 0, 0, out.data_ptr(), q.stride(0), 0, keys, keys + plane, self._stride, self._rows,
            self._slots, self._count, self._tiles, self._edges, q_heads, kv_heads, dim, dim**-0.5, self._scratch_at,
            lse.data_ptr(),
        )  # fmt: skip

    def _prepare(self, q_heads: int, kv_heads: int, dim: int) -> None:
        """Allocate the kernel's scratch memory at the first layer of an iteration."""
        if self._scratch is None:
            # A tile's partial answer covers up to 4 query heads: 4 * dim sums, 4 maxima and 4 totals, in fp32.
            quads = (q_heads // kv_heads + 3) // 4
            self._scratch = torch.empty(self._tile_count * quads * kv_heads * (4 * dim + 8), dtype=torch.float32)
            self._scratch_at = self._scratch.data_ptr()
