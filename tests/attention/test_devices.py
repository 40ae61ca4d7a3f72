"""The portable backend on every device that is here: the same mixed iteration as on CPU in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.runtime.attention import backend as primitive
from headway.runtime.attention.backend import BatchSegment
from headway.runtime.attention.cpu import CpuBackend
from headway.runtime.attention.kv_pool import KvPool

Q_HEADS, KV_HEADS, DIM = 8, 2, 64
FIRST = [BatchSegment(0, 40, 0, ((64, 16), (0, 64))), BatchSegment(40, 7, 0, ((96, 32),))]
SECOND = [BatchSegment(0, 1, 7, ((96, 32),)), BatchSegment(1, 30, 40, ((64, 16), (0, 64)))]
"""A prompt in two runs and a short one; then its next chunk, and a decode of the short one."""


def answers(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Both iterations over two layers, as fp32 on CPU."""
    pool = KvPool(2, KV_HEADS, 128, DIM, dtype, device)
    pool.data.fill_(float("nan"))
    backend = CpuBackend(None)
    generator = torch.Generator().manual_seed(3)
    outs = []
    for segments in (FIRST, SECOND):
        rows = segments[-1].start + segments[-1].tokens
        plan = backend.plan(segments, pool)
        for layer in range(2):
            q, k, v = (
                torch.randn(rows, heads, DIM, generator=generator).bfloat16().to(dtype).to(device)
                for heads in (Q_HEADS, KV_HEADS, KV_HEADS)
            )
            outs.append(backend.run(layer, q, k, v, plan).float().cpu())
    return outs


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_plain_operations_agree_with_the_cpu_kernel(
    device: str, dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other devices than CPU run, on this one too."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    wanted = answers("cpu", torch.float32)
    monkeypatch.setattr(primitive, "_attend_flash", primitive._attend_math)
    for got, want in zip(answers(device, dtype), wanted, strict=True):
        assert (got - want).abs().max() <= most * want.abs().max()
