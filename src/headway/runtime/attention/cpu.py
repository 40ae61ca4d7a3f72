"""Attention on CPU: by the compiled kernels where they are available, else by ATen's flash kernel.

Compiled, all decodes of a layer are one call and all chunks another, both over the pool; for fp32, and without a unit
for bf16, one call takes both, a decode being a chunk of one row. With ATen, a chunk's history
needs no mask and its own square needs the top-left causal mask that the kernel has, so a chunk is one folded call for
each slot range plus one causal call, merged; a decode is one call for each range, of which there is nearly always one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from typing_extensions import override

from headway.kv.allocator import cut_ranges
from headway.runtime.attention.backend import AttentionBackend, AttentionPlan, BatchSegment, attend, merge
from headway.runtime.attention.kv_pool import KvPool, KvWritePlan, plan_writes
from headway.runtime.attention.native import DIMS, general_kernels, isa, kernels
from headway.runtime.attention.native_calls import NativeChunks, NativeDecodes, pool_kernel


@dataclass(frozen=True, slots=True)
class _SegmentRows:
    """Rows of one segment, and the keys and values that they see."""

    start: int
    stop: int
    """The row behind its last."""
    shards: tuple[tuple[Tensor, ...], ...]
    """For each visible slot range: the views of all layers (`KvPool.range_views`)."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """One iteration's plan: what each segment reads, and where its new keys and values go."""

    rows: int
    native: NativeDecodes | None
    """All decodes, where the compiled kernel for them takes them (bf16). It also stores their keys and values."""
    prefill: NativeChunks | None
    """All chunks, where the compiled kernel takes them; decodes too where `native` does not."""
    decodes: tuple[_SegmentRows, ...]
    """All decodes otherwise."""
    chunks: tuple[_SegmentRows, ...]
    """All chunks otherwise."""
    writes: KvWritePlan
    """New keys and values, except those that `native` stores."""


class CpuBackend(AttentionBackend):
    """The backend named "cpu". Stateless: everything that lasts is in the pool.

    native: use the compiled kernels of this machine, if any.
    """

    def __init__(self, native: bool = True) -> None:
        self._compiled = native
        self._kernels = kernels() if native else None

    def kernels_of(self, dtype: torch.dtype) -> str:
        """Return what computes a dtype here, in words."""
        if dtype == torch.bfloat16 and self._kernels is not None:
            return f"compiled kernels ({'AMX' if self._kernels.tiles else 'AVX-512 BF16'})"
        if self._compiled and general_kernels(dtype) is not None:
            vectors = "AVX2" if isa() == "avx2" else "AVX-512"
            widened = ", bf16 widened to fp32" if dtype == torch.bfloat16 else ""
            return f"compiled kernels ({vectors}{widened})"
        return "ATen"

    @override
    def plan(self, segments: Sequence[BatchSegment], pool: KvPool) -> CpuPlan:
        check_cover(segments)
        decodes: list[_SegmentRows] = []
        chunks: list[_SegmentRows] = []
        new: list[tuple[int, int, int]] = []
        single_rows: list[int] = []
        single_runs: list[list[tuple[int, int]]] = []
        spans: list[tuple[int, int]] = []
        span_runs: list[list[tuple[int, int]]] = []
        kernel = pool_kernel(pool) if self._compiled else None
        by_kernel = kernel is not None
        # The kernel of decodes is for bf16, with a unit for it.
        decodes_apart = self._kernels is not None and pool.dtype == torch.bfloat16 and pool.head_dim in DIMS
        for segment in segments:
            # Keys in other pools too: only the write is planned here, the rows are attended by `partial`.
            if segment.shared:
                new += new_runs(segment)
                continue
            decode = segment.tokens == 1
            whole = decode or by_kernel
            # The compiled kernels and a decode read their own new keys from the pool; ATen's chunk takes them from k
            # and v.
            seen = cut_ranges(segment.slot_ranges, 0, segment.past + (segment.tokens if whole else 0))
            if by_kernel:
                # Kernels get raw addresses: bounds are checked here, once an iteration, and nowhere later.
                for first, count in seen:
                    pool.check(first, count)
            if decode and by_kernel and decodes_apart:
                # The decode kernel stores the new key and value itself, so this segment adds nothing to `new`.
                single_rows.append(segment.start)
                single_runs.append(seen)
                continue
            if by_kernel:
                spans.append((segment.start, segment.tokens))
                span_runs.append(seen)
            else:
                shards = tuple(pool.range_views(first, count) for first, count in seen)
                (decodes if decode else chunks).append(
                    _SegmentRows(segment.start, segment.start + segment.tokens, shards)
                )
            new += new_runs(segment)
        rows = segments[-1].start + segments[-1].tokens
        native = prefill = None
        if self._kernels is not None and single_rows:
            native = NativeDecodes(self._kernels, single_rows, single_runs, pool)
        if spans:
            prefill = NativeChunks(kernel, spans, span_runs, pool)
        return CpuPlan(rows, native, prefill, tuple(decodes), tuple(chunks), plan_writes(new, rows, pool))

    @override
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        assert isinstance(plan, CpuPlan)
        rows, q_heads, dim = q.shape
        kv_heads = k.shape[1]
        out = torch.empty((rows, q_heads, dim), dtype=q.dtype, device=q.device)
        # Decodes store their own keys; all other rows are stored before the chunk kernel reads them from the pool.
        if plan.native is not None:
            plan.native.run(layer, q, k, v, out)
        plan.writes.store(layer, k, v)
        if plan.prefill is not None:
            plan.prefill.run(layer, q, out)
        # `KvPool.range_views` interleaves planes: keys of layer i at 2i, values at 2i + 1.
        keys, values = 2 * layer, 2 * layer + 1
        for decode in plan.decodes:
            # The query heads of one KV head become rows of one call: (kv_heads, group, dim).
            grouped = q[decode.start].reshape(kv_heads, q_heads // kv_heads, dim)
            parts = [self._attend(grouped, shard[keys], shard[values], False) for shard in decode.shards]
            out[decode.start] = _combine(parts).reshape(q_heads, dim)
        for chunk in plan.chunks:
            fresh = slice(chunk.start, chunk.stop)
            query = q[fresh].transpose(0, 1)
            # The chunk's own square is causal; every earlier key is visible to all its rows, so history needs no mask.
            parts = [self._attend(query, k[fresh].transpose(0, 1), v[fresh].transpose(0, 1), True)]
            parts += [self._attend(query, shard[keys], shard[values], False) for shard in chunk.shards]
            out[fresh] = _combine(parts).transpose(0, 1)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, causal, compiled=self._compiled)


def new_runs(segment: BatchSegment) -> list[tuple[int, int, int]]:
    """Return (first row, first slot, tokens) of each slot range that a segment's new tokens go to."""
    new = []
    row = segment.start
    for first, count in cut_ranges(segment.slot_ranges, segment.past, segment.past + segment.tokens):
        new.append((row, first, count))
        row += count
    return new


def check_cover(segments: Sequence[BatchSegment]) -> None:
    """Raise ValueError unless segments follow each other from row 0 and each has the slots that it needs."""
    if not segments or segments[0].start != 0:
        raise ValueError("an iteration has at least one segment, and the first starts at row 0")
    for before, after in pairwise(segments):
        if after.start != before.start + before.tokens:
            raise ValueError(f"a segment ends at row {before.start + before.tokens}, the next starts at {after.start}")
    for segment in segments:
        held, needed = sum(count for _, count in segment.slot_ranges), segment.past + segment.tokens
        if segment.tokens < 1 or segment.past < 0 or held < needed:
            raise ValueError(
                f"segment at row {segment.start}: {held} slots for {segment.past} + {segment.tokens} tokens"
            )


def _combine(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    if len(parts) == 1:
        return parts[0][0]
    return merge([out for out, _ in parts], [lse for _, lse in parts])[0]
