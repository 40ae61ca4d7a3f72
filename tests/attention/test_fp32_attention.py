"""Attention in fp32 arithmetic against double precision: any heads, pasts, chunks and slots, in vectors of every width.

Bounds: answers within 1e-6 of the largest value times (1 + the largest score), log-sum-exps within 3e-6 of their size;
over bf16, whose own values are exact here, the same, and the rounding of an answer to bf16.
"""

from __future__ import annotations

import ctypes
import math
import platform
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.kernel_cases import chunk_over, in_pool, inputs, two_threads  # noqa: F401 - a fixture
from tests.helpers.kernels import ORDERS, exact, outgrowing
from tests.helpers.present import present
from torch import Tensor

from headway.core.native_build import LIBRARIES, build, find_compiler
from headway.kv.allocator import cut_ranges
from headway.runtime.attention.backend import attend
from headway.runtime.attention.backends import CpuBackend, kernels_of
from headway.runtime.attention.native import GENERAL_DIMS, NativeChunks, attend_native, general_kernels

FP32 = general_kernels(torch.float32)
pytestmark = pytest.mark.skipif(FP32 is None, reason="no C++ compiler or no AVX2 here: nothing to test")
PREBUILT = find_compiler() if platform.machine() == "x86_64" else None


def check(got: Tensor, wanted: Tensor, q: Tensor, k: Tensor) -> None:
    largest = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) / math.sqrt(q.shape[-1])
    assert (got.double() - wanted).abs().max() <= 1e-6 * (1 + largest) * float(wanted.abs().max())


def weighs(got: Tensor, wanted: Tensor) -> bool:
    """Whether log-sum-exps are as exact as they should be."""
    return torch.allclose(got.double(), wanted, rtol=3e-6, atol=3e-6)


def by_general_kernels(q: Tensor, k: Tensor, v: Tensor, block: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return causal attention of the last rows over a pool of the inputs' own type, in this type."""
    heads, rows, dim = q.shape
    pool, runs = in_pool(k, v, block, k.shape[1], seed)
    out = torch.empty(rows, heads, dim, dtype=dtype)
    chunks = NativeChunks(
        present(general_kernels(k.dtype)).prefill, [(0, rows)], [cut_ranges(runs, 0, k.shape[1])], pool
    )
    chunks.run(1, q.transpose(0, 1).contiguous(), out)
    return out.transpose(0, 1)


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
    q, k, v = inputs(seed, rows, past + rows, (group * kv_heads, kv_heads), dim, torch.float32)
    check(chunk_over(q, k, v, block, seed), exact(q, k, v, True)[0], q, k)


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
    assert dim in GENERAL_DIMS
    q, k, v = inputs(seed, rows, past + rows, heads, dim, torch.bfloat16)
    out = by_general_kernels(q, k, v, block, torch.bfloat16 if rounded else torch.float32, seed)
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
    q, k, v = inputs(seed, rows, keys, heads, 64, torch.float32)
    for causal in (False, True) if rows == keys else (False,):
        out, lse = attend(q, k, v, causal)
        wanted, weight = exact(q, k, v, causal)
        check(out, wanted, q, k)
        assert weighs(lse, weight)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("rows", "keys"), [(1, 5000), (3, 2048), (700, 2125), (2348, 2348)])
def test_spans_that_are_cut_for_threads_join_exactly(rows: int, keys: int) -> None:
    q, k, v = inputs(rows, rows, keys, (4, 1), 64, torch.float32)
    check(chunk_over(q, k, v, 300), exact(q, k, v, True)[0], q, k)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 17, pytest.param(512, marks=pytest.mark.long)])
def test_pasts_of_64k_are_as_exact(rows: int, dtype: torch.dtype) -> None:
    q, k, v = inputs(rows, rows, 65_600 + rows, (2, 1), 64, dtype)
    out = by_general_kernels(q, k, v, 2048, torch.float32)
    shard, lse = attend(q.float(), k.float(), v.float(), False)
    for head in range(2):
        one = slice(head, head + 1)
        check(out[one], exact(q[one], k, v, True)[0], q, k)
        wanted, weight = exact(q[one], k, v, False)
        check(shard[one], wanted, q, k)
        assert weighs(lse[one], weight)


@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.parametrize("strength", [1.0, 30.0, 3000.0])
@pytest.mark.parametrize("order", ORDERS)
def test_scores_that_keep_outgrowing_the_maximum(order: str, strength: float, rows: int) -> None:
    q, k, v = inputs(11, rows, 500, (4, 2), 64, torch.float32)
    k[:, :, 0] = outgrowing(order, strength, 500)
    q[:, :, 0] = q[:, :, 0].abs()
    check(attend(q, k, v, False)[0], exact(q, k, v, False)[0], q, k)


def test_equal_scores_give_the_mean_and_nan_is_not_hidden() -> None:
    for rows in (1, 20):
        q, k, v = inputs(17, rows, 777, (2, 1), 96, torch.float32)
        out, lse = attend(torch.zeros_like(q), k, v, False)
        assert torch.allclose(out, v.mean(1).expand(2, rows, 96), atol=1e-6)
        assert torch.allclose(lse, torch.full_like(lse, math.log(777)), atol=2e-6)
        assert attend(torch.full_like(q, math.nan), k, v, False)[0].isnan().all()


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
        q, k, v = inputs(rows, rows, keys, heads, dim, torch.float32)
        out, lse = attend_native(kernel, q, k, v, False, dim**-0.5, torch.float32)
        wanted, weight = exact(q, k, v, False)
        check(out, wanted, q, k)
        assert weighs(lse, weight)
