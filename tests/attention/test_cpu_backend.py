"""Mixed iterations over fragmented pools equal plain causal attention per request, with and without kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.core.errors import ConfigError
from headway.kv.allocator import cut_ranges
from headway.runtime.attention.backend import BatchSegment, attend
from headway.runtime.attention.backends import CpuBackend, make_backend
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.native import kernels


def fragmented(lengths: list[int], block: int, seed: int) -> tuple[list[tuple[tuple[int, int], ...]], int]:
    """Runs for each length, in blocks scattered over a pool; the pool's size."""
    counts = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    runs, used = [], 0
    for count in counts:
        runs.append(tuple((index * block, block) for index in order[used : used + count]))
        used += count
    return runs, used * block


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), True)[0].transpose(0, 1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.lists(st.sampled_from([1, 1, 1, 2, 5, 30]), min_size=1, max_size=6), min_size=1, max_size=4),
    block=st.sampled_from([1, 4, 16, 64]),
    shape=st.sampled_from([(4, 2, 16), (6, 2, 32), (8, 2, 64), (3, 3, 96), (7, 1, 128)]),
    native=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_any_interleaving_equals_each_request_alone(
    requests: list[list[int]], block: int, shape: tuple[int, int, int], native: bool, dtype: torch.dtype, seed: int
) -> None:
    q_heads, kv_heads, dim = shape
    lengths = [sum(chunks) for chunks in requests]
    runs, slots = fragmented(lengths, block, seed)
    pool = KvPool(2, kv_heads, slots, dim, dtype)
    pool.data.fill_(float("nan"))
    backend = CpuBackend(native)
    generator = torch.Generator().manual_seed(seed)
    data = [
        tuple(torch.randn(n, heads, dim, generator=generator).to(dtype) for heads in (q_heads, kv_heads, kv_heads))
        for n in lengths
    ]
    got: list[list[Tensor]] = [[] for _ in requests]
    for step in range(max(map(len, requests))):
        segments, rows, row = [], [], 0
        for index, chunks in enumerate(requests):
            if step < len(chunks):
                past = sum(chunks[:step])
                segments.append(BatchSegment(row, chunks[step], past, runs[index]))
                rows.append((index, past, past + chunks[step]))
                row += chunks[step]
        plan = backend.plan(segments, pool)
        q, k, v = (torch.cat([data[i][part][a:b] for i, a, b in rows]) for part in range(3))
        backend.run(0, q, v, k, plan)
        out = backend.run(1, q, k, v, plan)
        assert out.shape == q.shape
        assert out.is_contiguous()
        for (index, _, _), piece in zip(rows, out.split([b - a for _, a, b in rows]), strict=True):
            got[index].append(piece)
    bound = 3e-6 if dtype == torch.float32 else 2e-2
    for pieces, (q, k, v) in zip(got, data, strict=True):
        assert torch.allclose(torch.cat(pieces).float(), whole(q.float(), k.float(), v.float()), atol=bound)


@pytest.mark.skipif(kernels() is None, reason="no C++ compiler or no AVX-512 BF16 here: there are no kernels to test")
@pytest.mark.parametrize("context", [511, 512, 513, 1500])
def test_compiled_decode_equals_aten_over_many_tiles(context: int) -> None:
    pool = KvPool(1, 2, context + 1, 64, torch.bfloat16)
    pool.data.normal_(generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, 64, generator=generator).bfloat16() * 2 for heads in (8, 2, 2))
    segments = [BatchSegment(0, 1, context, ((0, context + 1),))]
    backends = (CpuBackend(True), CpuBackend(False))
    outs = [backend.run(0, q, k, v, backend.plan(segments, pool)).float() for backend in backends]
    wanted = attend(q.transpose(0, 1).float(), pool.data[0, 0].float(), pool.data[0, 1].float(), False)[0]
    for out in outs:
        assert torch.allclose(out, wanted.transpose(0, 1), atol=1e-2)


def test_adjacent_runs_are_one_view_and_cuts_are_exact() -> None:
    assert cut_ranges(((32, 16), (48, 16), (0, 16)), 0, 40) == [(32, 32), (0, 8)]
    assert cut_ranges(((32, 16), (48, 16), (0, 16)), 20, 33) == [(52, 12), (0, 1)]
    assert cut_ranges(((32, 16),), 16, 16) == []


def test_a_plan_refuses_rows_without_slots_and_gaps() -> None:
    pool, backend = KvPool(1, 1, 16, 16, torch.float32), CpuBackend()
    with pytest.raises(ValueError, match="8 slots for 8"):
        backend.plan([BatchSegment(0, 1, 8, ((0, 8),))], pool)
    with pytest.raises(ValueError, match="ends at row 2"):
        backend.plan([BatchSegment(0, 2, 0, ((0, 8),)), BatchSegment(3, 1, 0, ((8, 8),))], pool)
    for rows, past, runs in ((2, 0, (15, 8)), (4, 14, (0, 18)), (1, 16, (0, 17)), (4, 0, (-1, 4))):
        with pytest.raises(ValueError, match="outside the pool"):
            backend.plan([BatchSegment(0, rows, past, (runs,))], pool)


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known are cpu"):
        make_backend("abacus")
