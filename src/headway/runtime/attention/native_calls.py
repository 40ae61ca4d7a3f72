"""Calls of the compiled attention kernels: all decodes of a layer, or chunks of many rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.native import DIMS, GENERAL_DIMS, TILE, CompiledKernels, general_kernels, kernels

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


class NativeChunks:
    """Arguments of a chunk kernel (`chunk_kernel`) for one iteration's chunks.

    spans: each chunk's first row in the batch and its number of rows. shards: each chunk's visible slot ranges.
    causal: for each chunk, whether its own tokens are the last of its slots and masked causally; otherwise its rows see
    every slot. Default: all are causal.
    """

    def __init__(
        self,
        kernel: Any,
        spans: Sequence[tuple[int, int]],
        shards: Sequence[Runs],
        pool: KvPool,
        causal: Sequence[bool] | None = None,
    ) -> None:
        self._kernel = kernel
        self._pool = pool
        self._count = len(spans)
        masked = [True] * len(spans) if causal is None else causal
        self._table = chunk_table(
            [(*span, mask, slot_ranges) for span, mask, slot_ranges in zip(spans, masked, shards, strict=True)]
        )
        self._chunks = self._table.ctypes.data
        # Six int64 a chunk precede the slot ranges: 6 * 8 = 48 bytes.
        self._runs = self._chunks + 48 * self._count
        self._base, self._stride = pool.data.data_ptr(), pool.slots * pool.head_dim

    def run(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Write the chunks' rows of out (T, q_heads, dim). Their keys and values are in the pool already.

        With lse (T, q_heads) in fp32, answers are partial and out is fp32.
        """
        heads, dim = self._pool.kv_heads, self._pool.head_dim
        plane = self._pool.dtype.itemsize * heads * self._stride
        keys = self._base + 2 * plane * layer
        self._kernel(
            q.data_ptr(), q.stride(0), q.stride(1), keys, keys + plane, dim, self._stride,
            out.data_ptr(), out.stride(0), out.stride(1), int(out.dtype == torch.float32),
            0 if lse is None else lse.data_ptr(), 0 if lse is None else lse.stride(0), 1,
            self._chunks, self._count, self._runs, q.shape[1], heads, dim, dim**-0.5,
        )  # fmt: skip


def attend_native(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`primitive.attend` by a chunk kernel, for non-empty inputs that `shard_kernel` gave it for. dtype: the inputs' or
    fp32."""
    q_heads, rows, dim = q.shape
    kv_heads, keys, _ = k.shape
    # The kernel takes one pair of strides for both.
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    out = torch.empty((q_heads, rows, dim), dtype=dtype)
    lse = torch.empty((q_heads, rows), dtype=torch.float32)
    table = chunk_table([(0, rows, causal, [(0, keys)])])
    chunks = table.ctypes.data
    kernel(
        q.data_ptr(), q.stride(1), q.stride(0), k.data_ptr(), v.data_ptr(), k.stride(1), k.stride(0),
        out.data_ptr(), dim, rows * dim, int(dtype == torch.float32), lse.data_ptr(), 1, rows,
        chunks, 1, chunks + 48, q_heads, kv_heads, dim, scale,
    )  # fmt: skip
    return out, lse


def chunk_table(chunks: Sequence[tuple[int, int, bool, Runs]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the table that `headway_prefill` reads, from (first row, rows, causal, visible slots) of each chunk.

    Six numbers for each chunk (first row, rows, visible tokens, causal, its first range, its ranges), then all ranges.
    """
    head: list[int] = []
    flat: list[int] = []
    for row, rows, causal, slot_ranges in chunks:
        head += (row, rows, sum(count for _, count in slot_ranges), causal, len(flat) // 2, len(slot_ranges))
        for run in slot_ranges:
            flat += run
    return np.array([*head, *flat], dtype=np.int64)


def chunk_kernel(dtype: torch.dtype, device: torch.device, dim: int) -> Any:
    """Return the compiled kernel that attends chunks of this type and head dimension, or None.

    For bf16 with heads of 32, 64, 96 or 128 `headway_prefill` where the processor has it; else `headway_attend_*`, for
    heads of a multiple of 8 up to 256.
    """
    if device.type != "cpu":
        return None
    native = kernels() if dtype == torch.bfloat16 and dim in DIMS else None
    found = native or (general_kernels(dtype) if dim in GENERAL_DIMS else None)
    return None if found is None else found.prefill


def pool_kernel(pool: KvPool) -> Any:
    """Return the `chunk_kernel` of a pool, or None."""
    return chunk_kernel(pool.dtype, pool.data.device, pool.head_dim)


def shard_kernel(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Return the `chunk_kernel` of these, each with contiguous heads, or None."""
    alike = q.dtype == k.dtype == v.dtype and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    return chunk_kernel(q.dtype, q.device, q.shape[-1]) if alike else None
