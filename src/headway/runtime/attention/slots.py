"""Storing of new keys and values into slot ranges of the pool. `kv.slot_ranges` maps tokens to slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kv.slot_ranges import cut_ranges as cut_ranges
from headway.runtime.attention.kv_pool import KvPool

_SLICES_WORTH_IT = 64
"""Average tokens a slot range from which one copy per range beats one scattered copy of all."""


@dataclass(frozen=True, slots=True)
class KvWritePlan:
    """Where an iteration's new keys and values go: copies of whole slot ranges, or one scattered copy."""

    slices: tuple[tuple[int, int, tuple[Tensor, ...]], ...] = ()
    """(first row, end row, the range's views by layer): the copies of ranges."""
    rows: Tensor | None = None
    """Rows of the batch to copy to `slots`. None: all."""
    slots: Tensor | None = None
    """Target slots of the scattered copy."""
    planes: tuple[Tensor, ...] = ()
    """The keys and values of each layer, (kv_heads, slots, head_dim)."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy k and v, (T, kv_heads, head_dim), to their slots of one layer."""
        for plane, fresh in ((2 * layer, k), (2 * layer + 1, v)):
            for start, stop, views in self.slices:
                views[plane].copy_(fresh[start:stop].transpose(0, 1))
            if self.slots is not None:
                chosen = fresh if self.rows is None else fresh.index_select(0, self.rows)
                self.planes[plane].index_copy_(1, self.slots, chosen.transpose(0, 1))


def plan_writes(new: Sequence[tuple[int, int, int]], batch_rows: int, pool: KvPool) -> KvWritePlan:
    """Return the copies for (first row, first slot, tokens) of each new range. Called once an iteration."""
    tokens = sum(count for _, _, count in new)
    # Few or long ranges: contiguous copies. Many short ones: one scattered copy costs less than a call for each.
    if len(new) <= 2 or tokens >= _SLICES_WORTH_IT * len(new):
        return KvWritePlan(tuple((row, row + count, pool.range_views(first, count)) for row, first, count in new))
    slots = torch.cat([torch.arange(first, first + count) for _, first, count in new]).to(pool.data.device)
    rows = None
    # Decodes of the compiled kernel store themselves, so `new` need not cover the batch.
    if tokens != batch_rows:
        rows = torch.cat([torch.arange(row, row + count) for row, _, count in new]).to(pool.data.device)
    return KvWritePlan((), rows, slots, pool.data.flatten(0, 1).unbind(0))
