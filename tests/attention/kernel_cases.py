"""Inputs of attention kernels: random queries, keys and values, and pools that hold a past in shuffled blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from headway.runtime.attention.backend import BatchSegment
from headway.runtime.attention.backends import CpuBackend
from headway.runtime.attention.kv_pool import KvPool


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def inputs(
    seed: int, rows: int, keys: int, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q (q_heads, rows, dim), k and v (kv_heads, keys, dim)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads[0], rows, dim), (heads[1], keys, dim), (heads[1], keys, dim))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def in_pool(k: Tensor, v: Tensor, block: int, past: int, seed: int) -> tuple[KvPool, tuple[tuple[int, int], ...]]:
    """A pool with the first `past` tokens in shuffled blocks, NaN elsewhere, as its second layer; the runs of all."""
    heads, keys, dim = k.shape
    count = -(-keys // block)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = KvPool(2, heads, count * block, dim, k.dtype)
    pool.data.fill_(math.nan)
    slots = torch.tensor([place * block + at for place in order for at in range(block)])[:past]
    pool.data[1, 0, :, slots], pool.data[1, 1, :, slots] = k[:, :past], v[:, :past]
    return pool, tuple((place * block, block) for place in order)


def chunk_over(q: Tensor, k: Tensor, v: Tensor, block: int, seed: int = 0, compiled: bool = True) -> Tensor:
    """Return what the backend answers to the last rows of a prompt whose other tokens are in a pool."""
    rows, past = q.shape[1], k.shape[1] - q.shape[1]
    pool, runs = in_pool(k, v, block, past, seed)
    backend = CpuBackend(compiled)
    plan = backend.plan([BatchSegment(0, rows, past, runs)], pool)
    # A decode over bf16 has a kernel of its own.
    assert (plan.rest._chunks is not None) == compiled or (rows == 1 and k.dtype == torch.bfloat16)
    batch = [x.transpose(0, 1) for x in (q, k[:, past:], v[:, past:])]
    return backend.run(1, *batch, plan).transpose(0, 1)  # type: ignore[call-arg]
