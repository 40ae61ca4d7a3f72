"""The compiled prefill kernel against double precision and ATen: shapes, runs, masks, extremes, threads."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.kernel_cases import chunk_over, inputs, two_threads  # noqa: F401 - a fixture
from tests.helpers.kernels import ORDERS, WAYS, exact, outgrowing, use_kernels
from torch import Tensor

from headway.runtime.attention.backend import BatchSegment, attend
from headway.runtime.attention.backends import CpuBackend
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.native import kernels

pytestmark = pytest.mark.skipif(
    kernels() is None, reason="no C++ compiler or no AVX-512 BF16 here: there are no kernels to test"
)
BLOCK, SPAN = 192, 1024


@pytest.fixture(params=WAYS, scope="module", autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from use_kernels(request.param)


def check(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """bf16 weights and fp32 sums: answers within 2^-8 of the largest, log-sum-exps within fp32's own error."""
    assert torch.allclose(got[0].double(), wanted[0], rtol=0, atol=2**-8 * float(wanted[0].abs().max()))
    assert torch.allclose(got[1].double(), wanted[1], rtol=3e-6, atol=1e-5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rows=st.one_of(st.integers(2, 40), st.integers(90, 135)),
    past=st.one_of(st.just(0), st.integers(0, 40), st.integers(BLOCK - 9, 3 * BLOCK)),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 2), (8, 2), (7, 1), (3, 3)]),
    dim=st.sampled_from([32, 64, 96, 128]),
    block=st.sampled_from([1, 7, 16, 100, 1024]),
    seed=st.integers(0, 99),
)
def test_a_chunk_over_any_runs_is_exact_causal_attention(
    rows: int, past: int, heads: tuple[int, int], dim: int, block: int, seed: int
) -> None:
    q, k, v = inputs(seed, rows, past + rows, heads, dim, torch.bfloat16)
    outs = [chunk_over(q, k, v, block, seed, compiled).double() for compiled in (True, False)]
    wanted, _ = exact(q, k, v, True)
    errors = [float((out - wanted).abs().max()) for out in outs]
    assert errors[0] <= 2**-7 * float(wanted.abs().max())
    assert errors[0] <= 1.5 * errors[1] + 2**-8 * float(wanted.abs().max())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 130),
    keys=st.one_of(st.integers(1, 30), st.integers(BLOCK - 2, BLOCK + 2), st.integers(400, 900)),
    heads=st.sampled_from([(1, 1), (8, 2), (5, 1)]),
    dim=st.sampled_from([32, 64, 96, 128]),
    token_major=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_shard_gives_fp32_answers_and_their_weight(
    rows: int, keys: int, heads: tuple[int, int], dim: int, token_major: bool, seed: int
) -> None:
    q, k, v = inputs(seed, rows, keys, heads, dim, torch.bfloat16)
    if token_major:
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    out, lse = attend(q, k, v, False, dtype=torch.float32)
    assert out.dtype == lse.dtype == torch.float32
    check((out, lse), exact(q, k, v, False))
    if rows == keys:
        check(attend(q, k, v, True, dtype=torch.float32), exact(q, k, v, True))


@pytest.mark.parametrize("rows", [1, 16, 48, 49, 191, 192, 193])
def test_square_causal_calls_at_tile_edges(rows: int) -> None:
    q, k, v = inputs(rows, rows, rows, (4, 2), 64, torch.bfloat16)
    check(attend(q, k, v, True, dtype=torch.float32), exact(q, k, v, True))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("rows", "keys"),
    [(3, 2 * SPAN), (5, 4 * SPAN + 1), (40, 3 * SPAN - 1), (700, 2 * SPAN + 77), (2 * SPAN + 300, 2 * SPAN + 300)],
)
def test_spans_cut_for_threads_join_exactly(rows: int, keys: int) -> None:
    q, k, v = inputs(rows, rows, keys, (4, 1) if rows < keys else (1, 1), 64, torch.bfloat16)
    for causal in (False, True) if rows == keys else (False,):
        check(attend(q, k, v, causal, dtype=torch.float32), exact(q, k, v, causal))
    out = chunk_over(q, k, v, 300)
    wanted, _ = exact(q, k, v, True)
    assert (out.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", [1, 17, pytest.param(512, marks=pytest.mark.long)])
def test_pasts_of_64k_are_as_exact(rows: int) -> None:
    past = 65_600
    q, k, v = inputs(rows, rows, past + rows, (2, 1), 64, torch.bfloat16)
    out = chunk_over(q, k, v, 2048)
    shard, lse = attend(q, k, v, False, dtype=torch.float32)
    for head in range(2):
        one = slice(head, head + 1)
        wanted, _ = exact(q[one], k, v, True)
        assert (out[one].double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()
        check((shard[one], lse[one]), exact(q[one], k, v, False))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("strength", [1.0, 30.0, 3000.0])
def test_scores_that_keep_outgrowing_the_maximum(order: str, strength: float) -> None:
    q, k, v = inputs(11, 21, 500, (4, 2), 64, torch.bfloat16)
    k[:, :, 0] = outgrowing(order, strength, 500).bfloat16()
    q[:, :, 0] = q[:, :, 0].abs()
    check(attend(q, k, v, False, dtype=torch.float32), exact(q, k, v, False))


def test_huge_logits_are_finite_and_pick_the_largest() -> None:
    q, k, v = inputs(13, 30, 300, (2, 1), 64, torch.bfloat16)
    for sign in (1, -1):
        out, lse = attend(q * 1000, sign * k.abs() * 1000 if sign < 0 else k * 1000, v, False, dtype=torch.float32)
        assert out.isfinite().all()
        assert lse.isfinite().all()
    check(attend(q * 1000, k * 1000, v, False, dtype=torch.float32), exact(q * 1000, k * 1000, v, False))


def test_equal_scores_give_the_mean_and_the_count() -> None:
    q, k, v = inputs(17, 20, 777, (2, 1), 96, torch.bfloat16)
    out, lse = attend(torch.zeros_like(q), k, v, False, dtype=torch.float32)
    assert torch.allclose(out, v.float().mean(1).expand(2, 20, 96), atol=1e-6)
    assert torch.allclose(lse, torch.full_like(lse, math.log(777)), atol=1e-6)


def test_a_scale_and_the_type_of_the_answer_are_the_callers() -> None:
    q, k, v = inputs(23, 9, 40, (2, 2), 64, torch.bfloat16)
    wide, lse = attend(q, k, v, False, 0.25, dtype=torch.float32)
    scores = q.double() @ k.double().transpose(1, 2) * 0.25
    check((wide, lse), (torch.softmax(scores, -1) @ v.double(), torch.logsumexp(scores, -1)))
    narrow, _ = attend(q, k, v, False, 0.25)
    assert torch.equal(narrow, wide.bfloat16())


def test_chunks_that_share_a_prefix_in_one_iteration() -> None:
    past, rows = 333, (40, 2, 1, 65)
    q, k, v = inputs(29, sum(rows), past + sum(rows), (8, 2), 64, torch.bfloat16)
    pool = KvPool(1, 2, 1000, 64, torch.bfloat16)
    pool.data.fill_(float("nan"))
    for plane, data in enumerate((k, v)):
        pool.data[0, plane, :, 100 : 100 + past] = data[:, :past]
    segments, start = [], 0
    for count in rows:
        segments.append(BatchSegment(start, count, past, ((100, past), (500 + start, count))))
        start += count
    batch = [x.transpose(0, 1).contiguous() for x in (q, k[:, past:], v[:, past:])]
    backend = CpuBackend()
    out = backend.run(0, *batch, backend.plan(segments, pool)).transpose(0, 1)  # type: ignore[call-arg]
    for segment in segments:
        own = slice(segment.start, segment.start + segment.tokens)
        keys, values = (torch.cat([x[:, :past], x[:, past:][:, own]], 1) for x in (k, v))
        wanted, _ = exact(q[:, own], keys, values, True)
        assert (out[:, own].double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()
