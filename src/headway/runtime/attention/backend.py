"""Attention: the interface of backends, the one primitive over a shard of keys, and the exact merge of
partial answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.native import (
    DIMS,
    CompiledKernels,
    NativeChunks,
    NativeDecodes,
    attend_native,
    kernels,
    pool_kernel,
    shard_kernel,
)


class BatchSegment(NamedTuple):
    """One request's rows in this iteration's flattened batch."""

    start: int
    """Its first row."""
    tokens: int
    """Its rows; 1 for a decode."""
    past: int
    """Tokens of the request whose keys and values are already in the pool."""
    slot_ranges: tuple[tuple[int, int], ...]
    """Its slot ranges (first, count), in token order, covering at least past + tokens."""
    shared: bool = False
    """Its keys lie in other pools as well: store the new ones and leave its rows of the output unset. They are
    attended separately (`partial`)."""


class AttentionPlan(Protocol):
    """A backend's preparation of one iteration, opaque to its callers. Invalid once slots of the pool change owners."""

    @property
    def rows(self) -> int:
        """Rows of the flattened batch."""


class AttentionBackend(Protocol):
    """Attention over a `KvPool`, in two steps: `plan` once an iteration, `run` once a layer."""

    def plan(self, segments: Sequence[BatchSegment], pool: KvPool) -> AttentionPlan:
        """Prepare everything that does not depend on a layer's tensors. Called once, before the first layer.

        Segments are disjoint and together cover rows 0 … T-1 in order. Raises ValueError when they do not, or when a
        segment's runs hold fewer than past + tokens slots.
        """

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """Store the new keys and values, then attend causally within each request. Called once a layer.

        q: (T, q_heads, d); k, v: (T, kv_heads, d), rotated, in the pool's dtype; layer counts from the pool's first.
        Returns (T, q_heads, d) in q's dtype, contiguous. The pool holds k and v of all T rows on return.
        """


# The one attention primitive and the one merge that every layout, split and schedule is made of.
#
# A shard of keys gives a partial answer and the log-sum-exp of its scores; two partial answers over disjoint keys merge
# exactly. KV parallelism, rings, cascades and split-KV decoding are data movements around these two functions.

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


# Rows attended over a part of their keys, or all of them: what requests whose keys lie in several pools need (KV
# parallelism), and what the backend on CPU does for all but the decodes that store themselves.


class PartialRead(NamedTuple):
    """Rows start .. start + rows - 1 of a batch, over slot ranges of this pool."""

    start: int
    rows: int
    slot_ranges: Sequence[tuple[int, int]]
    """At least one slot range (first, count)."""
    causal: bool
    """The rows' own keys are the last of the slots; otherwise every row sees all of them."""

    @property
    def masked(self) -> bool:
        """Whether rows see different keys. A single row sees all of them either way."""
        return self.causal and self.rows > 1


def decode_kernels(pool: KvPool) -> CompiledKernels | None:
    """Return the kernels of decodes over this pool: for bf16, where the processor has a unit for it; or None."""
    fits = pool.dtype == torch.bfloat16 and pool.head_dim in DIMS and pool.data.device.type == "cpu"
    return kernels() if fits else None


class PartialAttention:
    """The attention of some rows in one iteration: planned at construction, `run` once a layer.

    The pool holds all keys and values that are read. compiled: use the compiled kernels of this machine, if any; else
    ATen computes.
    """

    def __init__(self, readings: Sequence[PartialRead], pool: KvPool, compiled: bool = True) -> None:
        self._pool = pool
        self._readings: list[tuple[PartialRead, list[tuple[Tensor, ...]]]] = []
        """Those for ATen, with the views of their slot ranges by layer."""
        self._decodes: NativeDecodes | None = None
        self._chunks: NativeChunks | None = None
        # Kernels get raw addresses: bounds are checked here, once an iteration, and nowhere later.
        for reading in readings:
            for first, count in reading.slot_ranges:
                pool.check(first, count)
        kernel = pool_kernel(pool) if compiled else None
        if kernel is None:
            self._readings = [(each, [pool.range_views(*run) for run in each.slot_ranges]) for each in readings]
            return
        # One row needs no mask, so the decode kernel serves it whatever `causal` says.
        native = decode_kernels(pool)
        single = [each for each in readings if each.rows == 1] if native is not None else []
        if native is not None and single:
            self._decodes = NativeDecodes(native, [r.start for r in single], [r.slot_ranges for r in single], pool)
        several = [each for each in readings if each.rows > 1 or native is None]
        if several:
            spans, causal = [(r.start, r.rows) for r in several], [r.causal for r in several]
            self._chunks = NativeChunks(kernel, spans, [r.slot_ranges for r in several], pool, causal)

    def run(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Write the rows' answers to out (T, q_heads, d), from q (T, q_heads, d). Other rows stay untouched.

        With lse (T, q_heads) in fp32, answers are partial: out is fp32, and never rounded before it is merged.
        """
        if self._decodes is not None:
            self._decodes.run(layer, q, out, None, lse)
        if self._chunks is not None:
            self._chunks.run(layer, q, out, lse)
        for reading, views in self._readings:
            rows = slice(reading.start, reading.start + reading.rows)
            # `KvPool.range_views` interleaves planes: keys of layer i at 2i, values at 2i + 1.
            shards = [(view[2 * layer], view[2 * layer + 1]) for view in views]
            out[rows], weight = self._attend(reading, q[rows], shards)
            if lse is not None:
                lse[rows] = weight

    def partial(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return out (T, q_heads, d) and lse (T, q_heads), both fp32, of which only the rows here are set."""
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.run(layer, q, out, lse)
        return out, lse

    def _attend(self, reading: PartialRead, q: Tensor, shards: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Compute one reading by ATen: one call for each slot range, and one causal call where rows are masked."""
        rows, heads, dim = q.shape
        own: list[tuple[Tensor, Tensor]] = []
        if reading.masked:
            shards, own = _split(shards, rows)
        kv_heads = self._pool.kv_heads
        # The query heads of one KV head become rows of one call: (kv_heads, group, dim).
        query = q.reshape(kv_heads, heads // kv_heads, dim) if rows == 1 else q.transpose(0, 1)
        parts = [attend(query, k, v, False, dtype=torch.float32, compiled=False) for k, v in shards]
        if own:
            # The causal call must be square over contiguous keys, but the rows' own slots may span ranges: join them.
            k, v = (torch.cat(both, dim=1) for both in zip(*own, strict=True))
            parts.append(attend(query, k, v, True, dtype=torch.float32, compiled=False))
        out, lse = parts[0] if len(parts) == 1 else merge([one for one, _ in parts], [one for _, one in parts])
        if rows == 1:
            return out.reshape(1, heads, dim), lse.reshape(1, heads)
        return out.transpose(0, 1), lse.transpose(0, 1)


def _split(
    shards: list[tuple[Tensor, Tensor]], last: int
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Return the shards before the last `last` keys, and those from there on."""
    # `at`: keys before the cut, counted from the current shard's start; it turns negative behind the cut.
    at = sum(k.shape[1] for k, _ in shards) - last
    before, behind = [], []
    for k, v in shards:
        count = k.shape[1]
        if at > 0:
            before.append((k[:, :at], v[:, :at]))
        if at < count:
            behind.append((k[:, max(at, 0) :], v[:, max(at, 0) :]))
        at -= count
    return before, behind
