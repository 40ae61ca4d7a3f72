"""The one attention primitive and the one merge that every layout, split and schedule is made of.

A shard of keys gives a partial answer and the log-sum-exp of its scores; two partial answers over disjoint keys merge
exactly. KV parallelism, rings, cascades and split-KV decoding are data movements around these two functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.runtime.attention.native_prefill import attend_native, shard_kernel

_SCORES = 1 << 26
"""The most fp32 scores that `_attend_math` holds at a time (256 MiB)."""

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
    compiled: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attend n query rows over one shard of m keys; return the answer and its log-sum-exp, its weight in a merge.

    q: (q_heads, n, d); k, v: (kv_heads, m, d), same dtype; q_heads is a multiple of kv_heads, and query head h reads
    KV head h // (q_heads // kv_heads). `causal` means row i sees keys 0..i and requires n == m. scale: 1/sqrt(d)
    unless given, positive. Returns out (q_heads, n, d) and lse (q_heads, n) in fp32, natural logarithm. dtype: out's,
    q's own unless given; fp32 for a partial answer that is still to be merged.

    An empty shard gives zeros and -inf, which `merge` ignores. Strides are free except that d is contiguous. On CPU
    this is the compiled kernel where there is one (and `compiled`), whose fp32 answer was never rounded, or else ATen's
    flash kernel. Scores and sums are fp32 in both.
    """
    q_heads, rows, dim = q.shape
    kv_heads, keys, _ = k.shape
    if causal and rows != keys:
        raise ValueError(f"a causal call is square, but there are {rows} rows and {keys} keys")
    dtype = dtype or q.dtype
    if keys == 0 or rows == 0:
        lse = torch.full((q_heads, rows), -math.inf, dtype=torch.float32, device=q.device)
        return torch.zeros_like(q, dtype=dtype), lse
    if compiled and dtype in (q.dtype, torch.float32):
        kernel = shard_kernel(q, k, v)
        if kernel is not None:
            return attend_native(kernel, q, k, v, causal, dim**-0.5 if scale is None else scale, dtype)
    # The flash kernel that returns the log-sum-exp is registered for CPU tensors only.
    attention = _attend_flash if q.device.type == "cpu" else _attend_math
    if causal or q_heads == kv_heads:
        out, lse = attention(q, k, v, causal, scale)
        return out.to(dtype), lse
    # Without a mask rows are independent, so the query heads of one KV head fold into its rows: no copy of keys.
    group = q_heads // kv_heads
    out, lse = attention(q.reshape(kv_heads, group * rows, dim), k, v, False, scale)
    return out.reshape(q_heads, rows, dim).to(dtype), lse.reshape(q_heads, rows)


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Combine partial answers over disjoint key shards, in any number and order.

    outs: each (..., d), any float dtype; lses: each (...), fp32. Returns (out, lse) in fp32. A shard with lse -inf has
    no weight; rows without any key stay zero with lse -inf, never NaN.
    """
    stacked = torch.stack([lse.float() for lse in lses])
    lse = torch.logsumexp(stacked, dim=0)
    # -inf minus -inf is NaN: rows without any key use anchor 0, and their weights become exp(-inf) = 0.
    anchor = lse.masked_fill(lse == -math.inf, 0.0)
    weights = torch.exp(stacked - anchor).unsqueeze(-1)
    out = outs[0] * weights[0]
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        out = torch.addcmul(out, part.float(), weight)
    return out, lse


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a second partial answer into out (..., d) and lse (...), fp32. The second must have no empty row."""
    # weight = exp(l2) / (exp(l1) + exp(l2)) = sigmoid(l2 - l1), without overflow.
    out.lerp_(part, torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _attend_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse = _flash_cpu(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 0.0, causal, scale=scale)
    return out.squeeze(0), lse.squeeze(0)


def _attend_math(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, scores_at_once: int = _SCORES
) -> tuple[Tensor, Tensor]:
    """`_attend_flash` by plain operations, for other devices. At most `scores_at_once` are materialised at a time."""
    group = q.shape[0] // k.shape[0]
    # Scores are q_heads x rows x keys numbers in fp32: bound the keys of one step, and merge the steps.
    most = max(1, scores_at_once // (q.shape[0] * q.shape[1]))
    if not causal and k.shape[1] > most:
        shards = zip(torch.split(k, most, dim=1), torch.split(v, most, dim=1), strict=True)
        parts = [_attend_math(q.float(), keys, values, False, scale) for keys, values in shards]
        merged, lse = merge([out for out, _ in parts], [lse for _, lse in parts])
        return merged.to(q.dtype), lse
    keys = k.float().repeat_interleave(group, dim=0)
    values = v.float().repeat_interleave(group, dim=0)
    scores = torch.matmul(q.float(), keys.transpose(1, 2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.matmul(torch.exp(scores - lse.unsqueeze(-1)), values)
    return out.to(q.dtype), lse
