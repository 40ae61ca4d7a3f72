"""Attention over several ranks: keys are passed round a ring, or query rows are sent to the keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headway.runtime.attention.primitive import attend, merge_into
from headway.runtime.sequence_parallel.mask_blocks import MaskBlock
from headway.runtime.sequence_parallel.steps import AttendInPlace, RingAttend
from headway.runtime.sequence_parallel.transport import MessageStream, TensorTransport

_PAIRS = 1 << 22
"""Rows times keys between two calls of `look`: some tens of ms of a core, far more than the overhead of a call."""


def attend_by_ring(
    transport: TensorTransport, step: RingAttend, query: Tensor, block: Tensor, look: Callable[[], None] = lambda: None
) -> Tensor:
    """Attend query (q_heads, rows, d) over every member's keys by a ring. Returns the same shape and type.

    block: this member's own keys and values, (2, kv_heads, keys, d), history first. look: called every so often.
    """
    answer = _PartialAnswer(query)
    for at in step.steps:
        sends, receives = [], []
        arriving = block
        if at.arriving >= 0:
            _, kv_heads, _, dim = block.shape
            arriving = block.new_empty(2, kv_heads, at.arriving_keys, dim)
            # Members without keys send nothing; both ends know the counts from the plan.
            if at.keys:
                block = block.contiguous()
                sends.append((step.behind, block))
            if at.arriving_keys:
                receives.append((step.before, arriving))
        wait = transport.exchange(sends, receives, MessageStream.RING)
        for part in at.blocks:
            for slice_ in _sliced(part):
                answer.add(slice_, block)
                look()
        # The next block has travelled while this one was attended to.
        wait()
        block = arriving
    return answer.out.to(query.dtype)


def attend_in_place(transport: TensorTransport, step: AttendInPlace, query: Tensor, block: Tensor) -> Tensor:
    """Attend query (q_heads, rows, d) over every member's keys in place: rows are sent, partial answers returned.

    Returns the same shape and type. block: this member's own keys and values, (2, kv_heads, keys, d).
    """
    heads, rows, dim = query.shape
    own = next(member for member in step.members if member.rank == transport.rank)
    others = [member for member in step.members if member.rank != transport.rank]
    # Ranks whose rows see keys of this rank, and ranks whose keys this rank's rows see.
    askers = [member for member in others if member.blocks]
    holders = [member.rank for member in others if member.attended]
    queries = [query.new_empty(heads, member.rows, dim) for member in askers]
    sent = query.contiguous()
    wait = transport.exchange(
        [(rank, sent) for rank in holders],
        [(member.rank, member_query) for member, member_query in zip(askers, queries, strict=True)],
        MessageStream.RING,
    )
    answer = _PartialAnswer(query)
    for part in own.blocks:
        answer.add(part, block)
    wait()
    answers = []
    for member, member_query in zip(askers, queries, strict=True):
        partial = _PartialAnswer(member_query)
        for part in member.blocks:
            partial.add(part, block)
        answers.append((member.rank, partial.packed()))
    came = [(rank, torch.empty((rows, heads, dim + 1), device=query.device)) for rank in holders]
    transport.exchange(answers, came, MessageStream.RING)()
    for _, partial_answer in came:
        answer.join(partial_answer)
    return answer.out.to(query.dtype)


def _sliced(part: MaskBlock) -> Iterator[MaskBlock]:
    """Divide a block of many keys; a causal block is not divided."""
    keys = max(1024, _PAIRS // max(1, part.row_end - part.row))
    if part.causal or part.key_end - part.key <= keys:
        yield part
        return
    for first in range(part.key, part.key_end, keys):
        yield part._replace(key=first, key_end=min(first + keys, part.key_end))


class _PartialAnswer:
    """Partial answers of all rows, merged as they come. `out` (heads, rows, d) lies row by row in memory."""

    def __init__(self, query: Tensor) -> None:
        heads, rows, dim = query.shape
        self._query = query
        self.out = torch.empty((rows, heads, dim), dtype=torch.float32, device=query.device).transpose(0, 1)
        self._lse = torch.full((heads, rows), -math.inf, dtype=torch.float32, device=query.device)
        self._answered: list[tuple[int, int]] = []

    def add(self, part: MaskBlock, block: Tensor) -> None:
        rows, keys = slice(part.row, part.row_end), slice(part.key, part.key_end)
        # block: (2, kv_heads, keys, d), keys first.
        k, v = block[:, :, keys]
        out, lse = attend(self._query[:, rows], k, v, part.causal, dtype=torch.float32)
        fresh = self._fresh(part.row, part.row_end)
        # The first answer of these rows is stored as it is: there is nothing to merge with.
        if fresh == [(part.row, part.row_end)]:
            self.out[:, rows], self._lse[:, rows] = out, lse
            return
        # Rows without an answer have lse -inf, and uninitialised memory, which must not be NaN: 0 * NaN is NaN.
        for first, end in fresh:
            self.out[:, first:end] = 0.0
        merge_into(self.out[:, rows], self._lse[:, rows], out, lse)

    def packed(self) -> Tensor:
        """Return all rows as one tensor (rows, heads, d + 1), the last column being the log-sum-exp."""
        for first, end in self._fresh(0, self.out.shape[1]):
            self.out[:, first:end] = 0.0
        return torch.cat([self.out.transpose(0, 1), self._lse.t().unsqueeze(-1)], dim=-1)

    def join(self, packed: Tensor) -> None:
        """Merge another rank's packed answer of the same rows. Each row must have an answer here already."""
        merge_into(self.out, self._lse, packed[..., :-1].transpose(0, 1), packed[..., -1].t())

    def _fresh(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the rows of a range that have no answer yet, and mark the range as answered."""
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
