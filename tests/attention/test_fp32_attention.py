"""Attention in fp32 arithmetic against double precision: any heads, pasts, chunks and slots, in vectors of every width.

Bounds: answers within 1e-6 of the largest value times (1 + the largest score), log-sum-exps within 3e-6 of their size;
over bf16, whose own values are exact here, the same, and the rounding of an answer to bf16.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import kernels
from torch import Tensor

from headway.core.native_build import LIBRARIES, build, find_compiler
from headway.kv.allocator import cut_ranges
from headway.runtime.attention.backend import BatchSegment, attend
from headway.runtime.attention.backends import CpuBackend, kernels_of
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.native import GENERAL_DIMS, NativeChunks, attend_native, general_kernels

FP32 = general_kernels(torch.float32)
pytestmark = pytest.mark.skipif(FP32 is None, reason="no C++ compiler or no AVX2 here: nothing to test")
PREBUILT = find_compiler() if platform.machine() == "x86_64" else None


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def inputs(seed: int, rows: int, keys: int, heads: tuple[int, int], dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (rows, q_heads, dim), k and v (keys, kv_heads, dim)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, heads[0], dim), (keys, heads[1], dim), (keys, heads[1], dim))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """In double precision, (rows, q_heads, dim) and (rows, q_heads); causal is aligned at the last row and key."""
    out, lse = kernels.exact(*(x.transpose(0, 1) for x in (q, k, v)), causal)  # type: ignore[call-arg]
    return out.transpose(0, 1), lse.transpose(0, 1)


def check(got: Tensor, wanted: Tensor, q: Tensor, k: Tensor) -> None:
    largest = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) / math.sqrt(q.shape[-1])
    assert (got.double() - wanted).abs().max() <= 1e-6 * (1 + largest) * float(wanted.abs().max())


def in_pool(k: Tensor, v: Tensor, block: int, past: int, seed: int) -> tuple[KvPool, tuple[tuple[int, int], ...]]:
    """A pool with the first `past` tokens in shuffled blocks, NaN elsewhere, as its second layer; the tokens' slots."""
    count = -(-len(k) // block)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = KvPool(2, k.shape[1], count * block, k.shape[2], torch.float32)
    pool.data.fill_(math.nan)
    slots = torch.tensor([place * block + at for place in order for at in range(block)])[:past]
    pool.data[1, 0, :, slots], pool.data[1, 1, :, slots] = k[:past].transpose(0, 1), v[:past].transpose(0, 1)
    return pool, tuple((place * block, block) for place in order)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.one_of(st.just(1), st.integers(1, 40), st.integers(120, 512)),
    past=st.one_of(st.just(0), st.integers(0, 70), st.integers(500, 1500)),
    group=st.integers(1, 16),
    kv_heads=st.sampled_from([1, 2]),
    dim=st.sampled_from([16, 24, 64, 80, 96, 128, 256]),
    block=st.sampled_from([1, 7, 16, 100, 2048]),
    seed=st.integers(0, 99),
)
def test_a_decode_or_chunk_over_any_slots_is_exact_causal_attention(
    rows: int, past: int, group: int, kv_heads: int, dim: int, block: int, seed: int
) -> None:
    q, k, v = inputs(seed, rows, past + rows, (group * kv_heads, kv_heads), dim)
    pool, slots = in_pool(k, v, block, past, seed)
    backend = CpuBackend()
    plan = backend.plan([BatchSegment(0, rows, past, slots)], pool)
    assert plan.rest._chunks is not None
    check(backend.run(1, q, k[past:], v[past:], plan), exact(q, k, v, True)[0], q, k)


@pytest.mark.long
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.one_of(st.just(1), st.integers(1, 40), st.integers(120, 512)),
    past=st.one_of(st.just(0), st.integers(0, 70), st.integers(5000, 9000)),
    heads=st.sampled_from([(1, 1), (8, 2), (5, 1), (16, 1)]),
    dim=st.sampled_from([16, 64, 80, 128, 256]),
    block=st.sampled_from([7, 64, 2048]),
    rounded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_bf16_is_widened_as_it_is_read(
    rows: int, past: int, heads: tuple[int, int], dim: int, block: int, rounded: bool, seed: int
) -> None:
    kernels = general_kernels(torch.bfloat16)
    assert kernels is not None
    assert dim in GENERAL_DIMS
    q, k, v = (x.bfloat16() for x in inputs(seed, rows, past + rows, heads, dim))
    wide, slots = in_pool(k.float(), v.float(), block, past + rows, seed)
    pool = KvPool(2, heads[1], wide.slots, dim, torch.bfloat16)
    pool.data.copy_(wide.data)
    out = torch.empty(rows, heads[0], dim, dtype=torch.bfloat16 if rounded else torch.float32)
    NativeChunks(kernels.prefill, [(0, rows)], [cut_ranges(slots, 0, past + rows)], pool).run(1, q, out)
    wanted, _ = exact(q, k, v, True)
    if rounded:
        assert (out.double() - wanted).abs().max() <= (2**-8 + 1e-5) * float(wanted.abs().max())
    else:
        check(out, wanted, q, k)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 130),
    keys=st.one_of(st.integers(1, 140), st.integers(400, 900)),
    heads=st.sampled_from([(1, 1), (8, 2), (5, 1)]),
    seed=st.integers(0, 99),
)
def test_a_shard_gives_the_weight_of_its_answer(rows: int, keys: int, heads: tuple[int, int], seed: int) -> None:
    q, k, v = inputs(seed, rows, keys, heads, 64)
    for causal in (False, True) if rows == keys else (False,):
        out, lse = attend(*(x.transpose(0, 1) for x in (q, k, v)), causal)  # type: ignore[call-arg]
        wanted, weight = exact(q, k, v, causal)
        check(out.transpose(0, 1), wanted, q, k)
        assert torch.allclose(lse.transpose(0, 1).double(), weight, rtol=3e-6, atol=3e-6)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("rows", "keys"), [(1, 5000), (3, 2048), (700, 2125), (2348, 2348)])
def test_spans_that_are_cut_for_threads_join_exactly(rows: int, keys: int) -> None:
    q, k, v = inputs(rows, rows, keys, (4, 1), 64)
    pool, slots = in_pool(k, v, 300, keys - rows, 0)
    backend = CpuBackend()
    out = backend.run(
        1, q, k[keys - rows :], v[keys - rows :], backend.plan([BatchSegment(0, rows, keys - rows, slots)], pool)
    )
    check(out, exact(q, k, v, True)[0], q, k)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 17, pytest.param(512, marks=pytest.mark.long)])
def test_pasts_of_64k_are_as_exact(rows: int, dtype: torch.dtype) -> None:
    past = 65_600
    q, k, v = (x.to(dtype) for x in inputs(rows, rows, past + rows, (2, 1), 64))
    wide, slots = in_pool(k.float(), v.float(), 2048, past + rows, 0)
    pool = KvPool(2, 1, wide.slots, 64, dtype)
    pool.data.copy_(wide.data)
    kernels, out = general_kernels(dtype), torch.empty(rows, 2, 64)
    assert kernels is not None
    NativeChunks(kernels.prefill, [(0, rows)], [cut_ranges(slots, 0, past + rows)], pool).run(1, q, out)
    parts = [x.float().transpose(0, 1) for x in (q, k, v)]
    shard, lse = attend(*parts, False)  # type: ignore[call-arg]
    for head in range(2):
        wanted, _ = exact(q[:, head : head + 1], k, v, True)
        check(out[:, head : head + 1], wanted, q, k)
        wanted, weight = exact(q[:, head : head + 1], k, v, False)
        check(shard[head].unsqueeze(1), wanted, q, k)
        assert torch.allclose(lse[head].double(), weight[:, 0], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.parametrize("strength", [1.0, 30.0, 3000.0])
@pytest.mark.parametrize("order", kernels.ORDERS)
def test_scores_that_keep_outgrowing_the_maximum(order: str, strength: float, rows: int) -> None:
    q, k, v = inputs(11, rows, 500, (4, 2), 64)
    k[:, :, 0] = kernels.outgrowing(order, strength, 500).unsqueeze(1)
    q[:, :, 0] = q[:, :, 0].abs()
    out, _ = attend(*(x.transpose(0, 1) for x in (q, k, v)), False)  # type: ignore[call-arg]
    check(out.transpose(0, 1), exact(q, k, v, False)[0], q, k)


def test_equal_scores_give_the_mean_and_nan_is_not_hidden() -> None:
    for rows in (1, 20):
        q, k, v = inputs(17, rows, 777, (2, 1), 96)
        parts = [x.transpose(0, 1) for x in (torch.zeros_like(q), k, v)]
        out, lse = attend(*parts, False)  # type: ignore[call-arg]
        assert torch.allclose(out, v.mean(0).expand(2, rows, 96), atol=1e-6)
        assert torch.allclose(lse, torch.full_like(lse, math.log(777)), atol=2e-6)
        parts[0] = torch.full_like(parts[0], math.nan)
        assert attend(*parts, False)[0].isnan().all()  # type: ignore[call-arg]


def test_what_computes_a_type_is_said() -> None:
    assert "compiled kernels (AVX" in kernels_of(CpuBackend(), torch.float32)
    assert kernels_of(CpuBackend(False), torch.float32) == "ATen"


@pytest.mark.long
@pytest.mark.skipif(PREBUILT is None, reason="needs a C++ compiler on x86-64")
@pytest.mark.parametrize(("name", "flags"), [("AVX2", ("-march=x86-64-v3",)), ("SSE", ("-march=x86-64",))])
def test_narrower_vectors_are_as_exact(tmp_path: Path, name: str, flags: tuple[str, ...]) -> None:
    library = tmp_path / f"{name}.so"
    assert PREBUILT is not None
    build(PREBUILT, LIBRARIES["fp32-avx2"], library, flags)
    kernel = ctypes.CDLL(str(library)).headway_attend_fp32
    assert FP32 is not None
    kernel.argtypes, kernel.restype = FP32.prefill.argtypes, None
    for rows, keys, heads, dim in ((1, 300, (8, 2), 64), (2, 65, (3, 3), 24), (77, 400, (6, 2), 128)):
        q, k, v = inputs(rows, rows, keys, heads, dim)
        parts = [x.transpose(0, 1) for x in (q, k, v)]
        out, lse = attend_native(kernel, *parts, False, dim**-0.5, torch.float32)  # type: ignore[call-arg]
        wanted, weight = exact(q, k, v, False)
        check(out.transpose(0, 1), wanted, q, k)
        assert torch.allclose(lse.transpose(0, 1).double(), weight, rtol=3e-6, atol=3e-6)
