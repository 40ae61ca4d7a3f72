"""Attention on CPU over ATen's flash kernel: views for history, the fresh tensors for the chunk itself.

A chunk's history needs no mask and its own square needs the top-left causal mask that the kernel has, so a chunk is
one folded call a run plus one causal call, merged. A decode is one call a run, and nearly always there is one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headway.attention.base import AttentionPlan, Segment
from headway.attention.kv_pool import KvPool
from headway.attention.primitive import attend, merge

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Rows:
    """One segment: its rows start..stop, and per run of visible slots the views of all layers (`run_views`)."""

    start: int
    stop: int
    shards: tuple[tuple[Tensor, ...], ...]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """One iteration, worked out: where to write, and what each segment reads."""

    rows: int
    decodes: tuple[_Rows, ...]
    chunks: tuple[_Rows, ...]
    writes: tuple[tuple[int, int, tuple[Tensor, ...]], ...]
    slots: Tensor | None
    pool: tuple[Tensor, ...]


class CpuBackend:
    """The backend named "cpu". Stateless: everything that lasts is in the pool."""

    def plan(self, segments: Sequence[Segment], pool: KvPool) -> CpuPlan:
        """See `AttentionBackend.plan`."""
        check_cover(segments)
        decodes: list[_Rows] = []
        chunks: list[_Rows] = []
        new: list[tuple[int, int, int]] = []
        for segment in segments:
            stop = segment.start + segment.tokens
            seen = segment.past + (1 if segment.tokens == 1 else 0)
            shards = tuple(pool.run_views(first, count) for first, count in cut_runs(segment.runs, 0, seen))
            (decodes if segment.tokens == 1 else chunks).append(_Rows(segment.start, stop, shards))
            row = segment.start
            for first, count in cut_runs(segment.runs, segment.past, segment.past + segment.tokens):
                new.append((row, first, count))
                row += count
        rows = segments[-1].start + segments[-1].tokens
        slots, writes = None, []
        if len(new) > 2 and rows < 64 * len(new):
            slots = torch.cat([torch.arange(first, first + count) for _, first, count in new])
        else:
            writes = [(row, row + count, pool.run_views(first, count)) for row, first, count in new]
        layers = pool.data.flatten(0, 1).unbind(0) if slots is not None else ()
        return CpuPlan(rows, tuple(decodes), tuple(chunks), tuple(writes), slots, layers)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """See `AttentionBackend.run`."""
        assert isinstance(plan, CpuPlan)
        _store(layer, k, v, plan)
        rows, q_heads, dim = q.shape
        kv_heads = k.shape[1]
        keys, values = 2 * layer, 2 * layer + 1
        if rows == 1 and len(plan.decodes[0].shards) == 1:
            shard = plan.decodes[0].shards[0]
            grouped = q.reshape(kv_heads, q_heads // kv_heads, dim)
            return attend(grouped, shard[keys], shard[values], False)[0].reshape(1, q_heads, dim)
        out = torch.empty((rows, q_heads, dim), dtype=q.dtype, device=q.device)
        for decode in plan.decodes:
            grouped = q[decode.start].reshape(kv_heads, q_heads // kv_heads, dim)
            parts = [attend(grouped, shard[keys], shard[values], False) for shard in decode.shards]
            out[decode.start] = _combine(parts).reshape(q_heads, dim)
        for chunk in plan.chunks:
            fresh = slice(chunk.start, chunk.stop)
            query = q[fresh].transpose(0, 1)
            parts = [attend(query, k[fresh].transpose(0, 1), v[fresh].transpose(0, 1), True)]
            parts += [attend(query, shard[keys], shard[values], False) for shard in chunk.shards]
            out[fresh] = _combine(parts).transpose(0, 1)
        return out


def check_cover(segments: Sequence[Segment]) -> None:
    """Raise ValueError unless segments follow each other from row 0 and each has the slots that it needs."""
    if not segments or segments[0].start != 0:
        raise ValueError("an iteration has at least one segment, and the first starts at row 0")
    for before, after in pairwise(segments):
        if after.start != before.start + before.tokens:
            raise ValueError(f"a segment ends at row {before.start + before.tokens}, the next starts at {after.start}")
    for segment in segments:
        held, needed = sum(count for _, count in segment.runs), segment.past + segment.tokens
        if segment.tokens < 1 or segment.past < 0 or held < needed:
            raise ValueError(
                f"segment at row {segment.start}: {held} slots for {segment.past} + {segment.tokens} tokens"
            )


def cut_runs(runs: Runs, begin: int, end: int) -> list[tuple[int, int]]:
    """The slots of tokens begin..end of a request, as runs; adjacent runs are joined."""
    cut: list[tuple[int, int]] = []
    token = 0
    for first, count in runs:
        low, high = max(begin, token), min(end, token + count)
        if low < high:
            slot = first + low - token
            if cut and sum(cut[-1]) == slot:
                cut[-1] = (cut[-1][0], cut[-1][1] + high - low)
            else:
                cut.append((slot, high - low))
        token += count
        if token >= end:
            break
    return cut


def _store(layer: int, k: Tensor, v: Tensor, plan: CpuPlan) -> None:
    keys, values = 2 * layer, 2 * layer + 1
    if plan.slots is not None:
        plan.pool[keys].index_copy_(1, plan.slots, k.transpose(0, 1))
        plan.pool[values].index_copy_(1, plan.slots, v.transpose(0, 1))
        return
    for start, stop, views in plan.writes:
        views[keys].copy_(k[start:stop].transpose(0, 1))
        views[values].copy_(v[start:stop].transpose(0, 1))


def _combine(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    if len(parts) == 1:
        return parts[0][0]
    return merge([out for out, _ in parts], [lse for _, lse in parts])[0]
