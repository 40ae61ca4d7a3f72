"""The backend over torch's SDPA against the CPU backend in fp32: on this device, and on CUDA where there is one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.runtime.attention import backend as primitive
from headway.runtime.attention.backend import AttentionBackend, BatchSegment
from headway.runtime.attention.backends import CpuBackend, SdpaBackend, make_backend
from headway.runtime.attention.kv_pool import KvPool

Q_HEADS, KV_HEADS, DIM, LAYERS = 8, 2, 64, 2
MOST = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
]


def answers(
    backend: AttentionBackend, batches: list[list[BatchSegment]], dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """Each batch over all layers, as fp32 on CPU; of shared segments nothing is said. Slots that nobody has written
    hold NaN."""
    pool = KvPool(LAYERS, KV_HEADS, 512, DIM, dtype, device)
    pool.data.fill_(float("nan"))
    generator = torch.Generator().manual_seed(3)
    outs = []
    for segments in batches:
        rows = segments[-1].start + segments[-1].tokens
        plan = backend.plan(segments, pool)
        assert plan.rows == rows
        said = torch.cat([torch.arange(s.start, s.start + s.tokens) for s in segments if not s.shared])
        for layer in range(LAYERS):
            q, k, v = (
                torch.randn(rows, heads, DIM, generator=generator).bfloat16().to(dtype).to(device)
                for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
            )
            out = backend.run(layer, q, k, v, plan)
            assert out.is_contiguous()
            assert out.dtype == dtype
            outs.append(out.float().cpu()[said])
    outs.append(pool.data.nan_to_num(0.0).float().cpu())
    return outs


def compare(got: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    for one, want in zip(got, wanted, strict=True):
        assert (one - want).abs().max() <= MOST[dtype] * want.abs().max()


def check(batches: list[list[BatchSegment]], dtype: torch.dtype, device: str, mask: int = 1 << 25) -> None:
    compare(
        answers(SdpaBackend(mask), batches, dtype, device), answers(CpuBackend(None), batches, torch.float32), dtype
    )


BATCHES = [
    [
        BatchSegment(0, 40, 0, ((64, 16), (0, 64))),
        BatchSegment(40, 7, 0, ((96, 32),)),
        BatchSegment(47, 5, 0, ((128, 32),)),
        BatchSegment(52, 7, 0, ((160, 32),)),
    ],
    [
        BatchSegment(0, 1, 7, ((96, 32),)),
        BatchSegment(1, 1, 5, ((128, 32),)),
        BatchSegment(2, 1, 7, ((160, 32),), shared=True),
        BatchSegment(3, 30, 40, ((64, 16), (0, 64))),
    ],
]
"""Runs out of order, decodes of one length and of several, one that others attend, and a chunk over a history."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_then_decodes_beside_a_chunk(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SDPA, and by the plain operations that the portable backend runs where it has no kernel."""
    check(BATCHES, dtype, device)
    check(BATCHES, dtype, device, mask=1000)
    wanted = answers(CpuBackend(None), BATCHES, torch.float32)
    monkeypatch.setattr(primitive, "_attend_flash", primitive._attend_math)
    compare(answers(CpuBackend(None), BATCHES, dtype, device), wanted, dtype)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=1, max_size=5),
    st.sampled_from([50, 1 << 25]),
)
def test_any_chunking_of_any_prompts(prompts: list[list[int]], mask: int) -> None:
    """Each prompt in its chunks, several prompts a batch."""
    batches = []
    for step in range(max(map(len, prompts))):
        segments: list[BatchSegment] = []
        at = 0
        for number, chunks in enumerate(prompts):
            if step < len(chunks):
                segments.append(BatchSegment(at, chunks[step], sum(chunks[:step]), ((number * 64, 64),)))
                at += chunks[step]
        batches.append(segments)
    check(batches, torch.float32, "cpu", mask)


def test_what_cannot_be_is_refused() -> None:
    pool = KvPool(1, KV_HEADS, 16, DIM, torch.float32)
    backend = make_backend("sdpa")
    with pytest.raises(ValueError, match="slots"):
        backend.plan([BatchSegment(0, 4, 0, ((0, 3),))], pool)
    with pytest.raises(ValueError, match="outside"):
        backend.plan([BatchSegment(0, 4, 0, ((14, 4),))], pool)


@pytest.mark.parametrize("device", DEVICES)
def test_partial_answers_are_the_same_in_pieces(device: str) -> None:
    """(out, lse) of what KV groups send each other, by plain operations: scores of some keys at a time."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(heads, rows, DIM, generator=generator) for heads, rows in ((8, 3), (2, 50), (2, 50)))
    wanted = primitive.attend(q, k, v, False, compiled=False)
    got = primitive._attend_math(q.to(device), k.to(device), v.to(device), False, None, scores_at_once=8 * 3 * 7)
    for one, other in zip(got, wanted, strict=True):
        assert (one.cpu() - other).abs().max() <= 2e-5 * other.abs().max()
