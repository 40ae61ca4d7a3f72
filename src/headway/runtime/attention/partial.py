"""Partial answers: rows attended over a part of their keys, with the weight that each answer carries in the merge.

For requests whose keys lie in several pools (KV parallelism). The same kernels as for whole requests; answers are fp32
and never rounded before they are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.native import DIMS, CompiledKernels
from headway.runtime.attention.native_decode import NativeDecodes
from headway.runtime.attention.native_prefill import NativeChunks
from headway.runtime.attention.primitive import attend, merge


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


class PartialAttention:
    """Partial attention of one iteration: planned at construction, `run` once a layer. kernels None: ATen computes."""

    def __init__(self, readings: Sequence[PartialRead], pool: KvPool, kernels: CompiledKernels | None) -> None:
        self._kernels = kernels if pool.dtype == torch.bfloat16 and pool.head_dim in DIMS else None
        self._pool = pool
        self._readings = tuple(readings)
        for reading in readings:
            for first, count in reading.slot_ranges:
                pool.check(first, count)
        self._decodes: NativeDecodes | None = None
        self._chunks: NativeChunks | None = None
        self._views: list[tuple[tuple[Tensor, ...], ...]] = []
        if self._kernels is None:
            self._views = [tuple(pool.range_views(*run) for run in reading.slot_ranges) for reading in readings]
            return
        # One row needs no mask, so the decode kernel serves it whatever `causal` says.
        single = [one for one in readings if one.rows == 1]
        several = [one for one in readings if one.rows > 1]
        if single:
            self._decodes = NativeDecodes(
                self._kernels, [r.start for r in single], [r.slot_ranges for r in single], pool
            )
        if several:
            spans = [(r.start, r.rows) for r in several]
            causal = [r.causal for r in several]
            self._chunks = NativeChunks(self._kernels.prefill, spans, [r.slot_ranges for r in several], pool, causal)

    def run(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return out (T, q_heads, d) and lse (T, q_heads), both fp32, from q (T, q_heads, d).

        Only rows of a `PartialRead` are set. The pool holds all keys and values that are read.
        """
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if self._decodes is not None:
            self._decodes.attend(layer, q, out, lse)
        if self._chunks is not None:
            self._chunks.run(layer, q, out, lse)
        if self._kernels is None:
            for reading, views in zip(self._readings, self._views, strict=True):
                rows = slice(reading.start, reading.start + reading.rows)
                out[rows], lse[rows] = self._attend(reading, q[rows], views, layer)
        return out, lse

    def _attend(
        self, reading: PartialRead, q: Tensor, views: tuple[tuple[Tensor, ...], ...], layer: int
    ) -> tuple[Tensor, Tensor]:
        """Compute one reading by ATen: one call for each slot range, and one causal call where rows are masked."""
        rows, heads, dim = q.shape
        shards = [(view[2 * layer], view[2 * layer + 1]) for view in views]
        own: list[tuple[Tensor, Tensor]] = []
        if reading.masked:
            shards, own = _split(shards, rows)
        kv_heads = self._pool.kv_heads
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
