"""Chunks of many rows in one call of the compiled kernel: over the pool, or over any shard of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.native import DIMS, GENERAL_DIMS, general_kernels, kernels
from headway.runtime.attention.native_decode import Runs


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
