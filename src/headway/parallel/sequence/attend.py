"""Carrying out a ring: attend to a block of keys while the next one arrives."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway.attention.primitive import attend, merge_into
from headway.parallel.sequence.cover import Block
from headway.parallel.sequence.steps import Attend
from headway.parallel.sequence.transport import Lane, Transport


def go_round(transport: Transport, step: Attend, query: Tensor, block: Tensor) -> Tensor:
    """The attention of query (q_heads, rows, d) over every member's keys. Returns the same shape and type.

    block: this member's own keys and values, (2, kv_heads, keys, d), history first.
    """
    answer = _Answer(query)
    for at in step.steps:
        sends, receives = [], []
        arriving = block
        if at.arriving >= 0:
            _, kv_heads, _, dim = block.shape
            arriving = block.new_empty(2, kv_heads, at.arriving_keys, dim)
            if at.keys:
                block = block.contiguous()
                sends.append((step.behind, block))
            if at.arriving_keys:
                receives.append((step.before, arriving))
        wait = transport.exchange(sends, receives, Lane.RING)
        for part in at.blocks:
            answer.add(part, block)
        wait()
        block = arriving
    return answer.out.to(query.dtype)


class _Answer:
    """Partial answers of all rows, merged as they come. `out` (heads, rows, d) lies row by row in memory."""

    def __init__(self, query: Tensor) -> None:
        heads, rows, dim = query.shape
        self._query = query
        self.out = torch.empty((rows, heads, dim), dtype=torch.float32, device=query.device).transpose(0, 1)
        self._lse = torch.full((heads, rows), -math.inf, dtype=torch.float32, device=query.device)
        self._answered: list[tuple[int, int]] = []

    def add(self, part: Block, block: Tensor) -> None:
        rows, keys = slice(part.row, part.row_end), slice(part.key, part.key_end)
        k, v = block[:, :, keys]
        out, lse = attend(self._query[:, rows], k, v, part.causal, dtype=torch.float32)
        fresh = self._fresh(part.row, part.row_end)
        if fresh == [(part.row, part.row_end)]:
            self.out[:, rows], self._lse[:, rows] = out, lse
            return
        for first, end in fresh:
            self.out[:, first:end] = 0.0
        merge_into(self.out[:, rows], self._lse[:, rows], out, lse)

    def _fresh(self, first: int, end: int) -> list[tuple[int, int]]:
        """The rows of a range that have no answer yet; they have one from now on."""
        gaps, at, joined = [], first, (first, end)
        others = []
        for low, high in self._answered:  # ascending
            if high < first or low > end:
                others.append((low, high))
                continue
            if low > at:
                gaps.append((at, low))
            at = max(at, high)
            joined = (min(joined[0], low), max(joined[1], high))
        if at < end:
            gaps.append((at, end))
        self._answered = sorted([*others, joined])
        return gaps
