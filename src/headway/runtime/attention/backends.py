"""The backends: attention on CPU by the compiled kernels or ATen's flash kernel, and by torch's
scaled_dot_product_attention, for CUDA.

On CPU, compiled, all decodes of a layer are one call and all chunks another, both over the pool; for fp32, and without
a unit for bf16, one call takes both, a decode being a chunk of one row. With ATen, a chunk's history needs no mask and
its own square needs the top-left causal mask that the kernel has, so a chunk is one folded call for each slot range
plus one causal call, merged; a decode is one call for each range, of which there is nearly always one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from headway.core.errors import ConfigError
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


# Attention by torch's scaled_dot_product_attention over gathered keys and values: for CUDA, correct on any device.
#
# Torch chooses the kernel. Query heads of one KV head are folded into rows, a shape that every kernel supports. Decodes
# of similar length are one padded call; a chunk is one call, or several where its mask would be large.

_MASK = 1 << 25
"""The most entries of one call's mask."""


@dataclass(frozen=True, slots=True)
class _DecodeGather:
    """Decodes that share one call."""

    rows: Tensor
    """(B,) rows of the batch."""
    slots: Tensor
    """(B, m) slots that each attends to, padded to the longest."""
    seen: Tensor | None
    """(B, 1, 1, m) mask of the padding. None: all have the same length."""


@dataclass(frozen=True, slots=True)
class _ChunkGather:
    """One chunk: rows start .. start + tokens - 1 of the batch."""

    start: int
    tokens: int
    past: int
    slots: Tensor
    """(past + tokens,)."""


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """One iteration's plan, as index tensors on the pool's device."""

    rows: int
    pool: KvPool
    decodes: tuple[_DecodeGather, ...]
    chunks: tuple[_ChunkGather, ...]
    writes: KvWritePlan


class SdpaBackend(AttentionBackend):
    """The backend named "sdpa". Stateless. `mask`: the most entries of a call's mask."""

    def __init__(self, mask: int = _MASK) -> None:
        self._mask = mask

    @override
    def plan(self, segments: Sequence[BatchSegment], pool: KvPool) -> SdpaPlan:
        check_cover(segments)
        alike: dict[int, list[tuple[int, Tensor]]] = {}
        chunks: list[_ChunkGather] = []
        new: list[tuple[int, int, int]] = []
        for segment in segments:
            new += new_runs(segment)
            if segment.shared:
                continue
            slots = _slots(cut_ranges(segment.slot_ranges, 0, segment.past + segment.tokens), pool)
            if segment.tokens == 1:
                # Decodes within a factor of two in length share a call, so padding at most doubles what is read.
                alike.setdefault(len(slots).bit_length(), []).append((segment.start, slots))
            else:
                chunks.append(_ChunkGather(segment.start, segment.tokens, segment.past, slots.to(pool.data.device)))
        rows = segments[-1].start + segments[-1].tokens
        decodes = tuple(_together(some, pool.data.device) for some in alike.values())
        return SdpaPlan(rows, pool, decodes, tuple(chunks), plan_writes(new, rows, pool))

    @override
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        assert isinstance(plan, SdpaPlan)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        plan.writes.store(layer, k, v)
        # New keys are stored first: gathered keys include the rows' own.
        keys, values = plan.pool.data[layer]
        _, heads, dim = q.shape
        for some in plan.decodes:
            # (B, kv_heads, group, dim): the query heads of one KV head are rows of one attention head.
            query = q.index_select(0, some.rows).view(len(some.rows), len(keys), -1, dim)
            near, far = (plane[:, some.slots].transpose(0, 1) for plane in (keys, values))
            answer = functional.scaled_dot_product_attention(query, near, far, some.seen)
            out.index_copy_(0, some.rows, answer.reshape(-1, heads, dim))
        for chunk in plan.chunks:
            near, far = (plane.index_select(1, chunk.slots).unsqueeze(0) for plane in (keys, values))
            rows = slice(chunk.start, chunk.start + chunk.tokens)
            self._chunk(q[rows], near, far, chunk.past, out[rows])
        return out

    def _chunk(self, q: Tensor, keys: Tensor, values: Tensor, past: int, out: Tensor) -> None:
        """Attend one chunk. q, out: (n, q_heads, d); keys, values: (1, kv_heads, past + n, d)."""
        count, heads, dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        # The mask has group * rows x seen entries; cut the rows so that it stays within the limit.
        each = max(1, self._mask // (group * (past + count)))
        for first in range(0, count, each):
            rows = min(each, count - first)
            seen = past + first + rows
            # Position of each folded row: the same sequence of positions, once for each query head of the group.
            at = torch.arange(seen - rows, seen, device=q.device).repeat(group)
            visible = torch.arange(seen, device=q.device) <= at.unsqueeze(1)
            query = q[first : first + rows].view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
            answer = functional.scaled_dot_product_attention(
                query.reshape(1, kv_heads, group * rows, dim), keys[:, :, :seen], values[:, :, :seen], visible
            )
            answer = answer.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3)
            out[first : first + rows] = answer.reshape(rows, heads, dim)


def _slots(slot_ranges: Sequence[tuple[int, int]], pool: KvPool) -> Tensor:
    for first, count in slot_ranges:
        pool.check(first, count)
    return torch.cat([torch.arange(first, first + count) for first, count in slot_ranges])


def _together(some: Sequence[tuple[int, Tensor]], device: torch.device) -> _DecodeGather:
    """Return decodes as one call. Padding repeats a decode's first slot, which holds finite numbers, and is masked."""
    longest = max(len(slots) for _, slots in some)
    table = torch.stack([torch.cat((slots, slots[:1].expand(longest - len(slots)))) for _, slots in some])
    seen = None
    if any(len(slots) < longest for _, slots in some):
        lengths = torch.tensor([len(slots) for _, slots in some])
        seen = (torch.arange(longest) < lengths.unsqueeze(1)).view(len(some), 1, 1, longest).to(device)
    return _DecodeGather(torch.tensor([row for row, _ in some], device=device), table.to(device), seen)


_BACKENDS: dict[str, type[AttentionBackend]] = {"cpu": CpuBackend, "sdpa": SdpaBackend}


def make_backend(name: str) -> AttentionBackend:
    """Return the backend of that name. Called once at start-up; ConfigError lists the known names."""
    if name not in _BACKENDS:
        raise ConfigError(f"unknown attention backend '{name}': known are {', '.join(sorted(_BACKENDS))}")
    return _BACKENDS[name]()


def kernels_of(backend: AttentionBackend, dtype: torch.dtype) -> str:
    """Return what a backend computes a dtype with, in words."""
    return backend.kernels_of(dtype) if isinstance(backend, CpuBackend) else "ATen"
