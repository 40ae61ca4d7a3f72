"""Each set of compiled bf16 kernels that this processor can run, in turn; attention in double precision."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from headway.runtime.attention.native import CompiledKernels, build_library, kernels

HERE = kernels()
WAYS = () if HERE is None else ("vectors", "tiles") if HERE.tiles else ("vectors",)
_USERS = ("attention.native", "attention.backend", "attention.backends")


def use_kernels(way: str) -> Iterator[None]:
    """Compute by vectors or by AMX's tiles until the generator goes on."""
    library = build_library()
    assert library is not None
    chosen = CompiledKernels(library, way == "tiles")
    with pytest.MonkeyPatch.context() as patch:
        for user in _USERS:
            patch.setattr(f"headway.runtime.{user}.kernels", lambda: chosen)
        yield


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exps in double precision, of q (q_heads, rows, dim), k and v (kv_heads, keys, dim); causal
    is aligned at the last row and key."""
    group = q.shape[0] // k.shape[0]
    keys, values = k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)
    scores = q.double() @ keys.transpose(1, 2) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


ORDERS = ("rising", "falling", "spikes")


def outgrowing(order: str, strength: float, keys: int) -> Tensor:
    """What to multiply keys with, so that scores keep outgrowing the largest before."""
    ramp = torch.linspace(0.0, strength, keys)
    if order == "falling":
        ramp = ramp.flip(0)
    return ramp * (torch.arange(keys) % 97 == 5) if order == "spikes" else ramp
