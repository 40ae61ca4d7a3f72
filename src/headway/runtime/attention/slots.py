"""Slots of the pool as runs: how new tokens are stored there. Which ones a range of tokens lies in:
`kv.slot_ranges`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kv.slot_ranges import cut_runs as cut_runs
from headway.runtime.attention.kv_pool import KvPool

_SLICES_WORTH_IT = 64
"""Tokens a run from which a copy per run beats one scattered copy of all of them."""


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
    """Once an iteration, from (first row, first slot, tokens) of each new run."""
    tokens = sum(count for _, _, count in new)
    if len(new) <= 2 or tokens >= _SLICES_WORTH_IT * len(new):
        return KvWritePlan(tuple((row, row + count, pool.run_views(first, count)) for row, first, count in new))
    slots = torch.cat([torch.arange(first, first + count) for _, first, count in new]).to(pool.data.device)
    rows = None
    if tokens != batch_rows:
        rows = torch.cat([torch.arange(row, row + count) for row, _, count in new]).to(pool.data.device)
    return KvWritePlan((), rows, slots, pool.data.flatten(0, 1).unbind(0))
