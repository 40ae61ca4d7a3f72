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
from headway.runtime.attention.backend import (
    AttentionBackend,
    AttentionPlan,
    BatchSegment,
    PartialAttention,
    PartialRead,
    decode_kernels,
)
from headway.runtime.attention.kv_pool import KvPool, KvWritePlan, plan_writes
from headway.runtime.attention.native import NativeDecodes, general_kernels, isa, kernels


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """One iteration's plan: what each segment reads, and where its new keys and values go."""

    rows: int
    decodes: NativeDecodes | None
    """All decodes, where there is a compiled kernel of decodes (bf16). It also stores their keys and values."""
    rest: PartialAttention
    """All other rows, which see their new keys in the pool."""
    writes: KvWritePlan
    """New keys and values, except those that `decodes` stores."""


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
        readings: list[PartialRead] = []
        new: list[tuple[int, int, int]] = []
        single_rows: list[int] = []
        single_runs: list[list[tuple[int, int]]] = []
        native = decode_kernels(pool) if self._compiled else None
        for segment in segments:
            seen = cut_ranges(segment.slot_ranges, 0, segment.past + segment.tokens)
            if segment.tokens == 1 and native is not None and not segment.shared:
                # Kernels get raw addresses: bounds are checked here, once an iteration, and nowhere later.
                for first, count in seen:
                    pool.check(first, count)
                # The decode kernel stores the new key and value itself, so this segment adds nothing to `new`.
                single_rows.append(segment.start)
                single_runs.append(seen)
                continue
            new += new_runs(segment)
            # Keys in other pools too: only the write is planned here.
            if not segment.shared:
                readings.append(PartialRead(segment.start, segment.tokens, seen, True))
        rows = segments[-1].start + segments[-1].tokens
        decodes = None
        if native is not None and single_rows:
            decodes = NativeDecodes(native, single_rows, single_runs, pool)
        rest = PartialAttention(readings, pool, self._compiled)
        return CpuPlan(rows, decodes, rest, plan_writes(new, rows, pool))

    @override
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        assert isinstance(plan, CpuPlan)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # Decodes store their own keys; all other rows are stored before they are read from the pool.
        if plan.decodes is not None:
            plan.decodes.run(layer, q, out, (k, v))
        plan.writes.store(layer, k, v)
        plan.rest.run(layer, q, out)
        return out


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
