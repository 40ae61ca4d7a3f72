"""Attention over several ranks: each rank's keys, the registers that leave it, and the transport between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headway.kv.allocator import cut_ranges
from headway.runtime.attention.backend import attend, merge_into
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.sequence_parallel.layout import KvMove, Positions
from headway.runtime.sequence_parallel.schedule import (
    ROWS,
    AttendInPlace,
    ExchangeRows,
    MaskBlock,
    PeerMessage,
    RegisterSlice,
    RingAttend,
)

# Interface of tensor transport between ranks. Live: sockets between instances; in tests: threads.
#
# Point to point only. A group is chosen for each chunk of each request, and it grows: communicators for collectives
# would have to be made by all ranks of the world for every group that occurs, and shares are uneven, which gloo's
# collectives are not. Each exchange of this package moves no more bytes than the collective that it stands for.


class MessageStream(IntEnum):
    """Stream of messages between two ranks. Order is kept within a stream, not between streams."""

    ROWS = 0
    RING = 1
    HISTORY = 2
    WEIGHTS = 3
    PAUSE = 4


class TensorTransport(Protocol):
    """One rank's end."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], stream: MessageStream
    ) -> Callable[[], None]:
        """Begin to send tensors to ranks and to fill tensors from ranks; the returned function waits for all of them.

        All are contiguous and not empty. Until it has waited, the caller changes nothing that is sent and reads nothing
        that is filled. Peers begin their sides in the same order within a stream.
        """


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


class MatrixRegisters(dict[str, Tensor]):
    """Matrices by name."""

    def take(self, name: str) -> Tensor:
        """Return a register and remove it, unless it is the residual stream."""
        return self[name] if name == ROWS else self.pop(name)


def start_exchange(
    transport: TensorTransport, step: ExchangeRows, source: Tensor, stream: MessageStream
) -> Callable[[], Tensor]:
    """Begin an exchange; the result waits for it and returns the target."""
    rank = transport.rank
    target = source.new_empty(step.rows, step.columns)
    sends = [(piece.peer, packed(source, piece)) for piece in step.sends]
    own = next((data for peer, data in sends if peer == rank), None)
    parts = [(piece, own if piece.peer == rank else _room(target, piece, step.add)) for piece in step.receives]
    wait = transport.exchange(
        [(peer, data) for peer, data in sends if peer != rank],
        [(piece.peer, data) for piece, data in parts if piece.peer != rank and data is not None],
        stream,
    )

    def finish() -> Tensor:
        wait()
        if step.add:
            return _summed(target, parts)
        for piece, data in parts:
            assert data is not None
            unpack(target, piece, data)
        return target

    return finish


def packed(source: Tensor, piece: PeerMessage) -> Tensor:
    """Return a message's cuts as one contiguous tensor: a view where they are one block of whole rows."""
    parts = [_cut(source, cut) for cut in piece.cuts]
    if len(parts) == 1:
        return parts[0].contiguous().view(-1)
    return torch.cat([part.reshape(-1) for part in parts])


def unpack(target: Tensor, piece: PeerMessage, data: Tensor) -> None:
    """Copy a received message into its cuts of the target, unless it was received in place."""
    at = 0
    for cut in piece.cuts:
        view = _cut(target, cut)
        part = data[at : at + cut.size]
        # Equal addresses: `_room` let the message be received into the target itself.
        if view.data_ptr() != part.data_ptr():
            view.copy_(part.view(view.shape))
        at += cut.size


def _summed(target: Tensor, parts: list[tuple[PeerMessage, Tensor | None]]) -> Tensor:
    """Sum parts, each of the target's shape, in an order that is the same on every rank."""
    if not parts:
        return target
    for place, (_, data) in enumerate(parts):
        assert data is not None
        part = data.view(target.shape)
        target.copy_(part) if place == 0 else target.add_(part)
    return target


def _room(target: Tensor, piece: PeerMessage, add: bool) -> Tensor:
    """Return the receive buffer of a message: the target itself where its cut is one block of whole rows."""
    if len(piece.cuts) == 1 and not add:
        view = _cut(target, piece.cuts[0])
        if view.is_contiguous():
            return view.view(-1)
    return target.new_empty(sum(cut.size for cut in piece.cuts))


def _cut(matrix: Tensor, cut: RegisterSlice) -> Tensor:
    return matrix[cut.row : cut.row_end, cut.column : cut.column_end]


Runs = Sequence[tuple[int, int]]
_Index = slice | Tensor


class KvShard:
    """Slot ranges (first slot, count) of a pool that a request owns, in order. One range is read without copying."""

    def __init__(self, pool: KvPool, slot_ranges: Runs) -> None:
        self.pool = pool
        self.slot_ranges = tuple(slot_ranges)
        self.capacity = sum(count for _, count in self.slot_ranges)

    def extend(self, slot_ranges: Runs) -> None:
        """Append slot ranges. Adjacent ranges are joined, so that they are read without copying."""
        joined = list(self.slot_ranges)
        for first, count in slot_ranges:
            # first + count of the last range: the new one follows it directly.
            if joined and sum(joined[-1]) == first:
                joined[-1] = (joined[-1][0], joined[-1][1] + count)
            else:
                joined.append((first, count))
        self.slot_ranges = tuple(joined)
        self.capacity += sum(count for _, count in slot_ranges)

    def block(self, layer: int, tokens: int) -> Tensor:
        """Return KV of the first `tokens` slots, (2, kv_heads, tokens, head_dim); a view where possible."""
        planes = self.pool.data[layer]
        parts = [planes[:, :, first : first + count] for first, count in cut_ranges(self.slot_ranges, 0, tokens)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2) if parts else planes[:, :, :0]

    def copy(self, source: KvShard, tokens: int) -> None:
        """Copy KV of all layers in the first `tokens` slots of another shard of the same pool to the first here."""
        for layer in range(self.pool.layers):
            row, block = 0, source.block(layer, tokens)
            for first, count in cut_ranges(self.slot_ranges, 0, tokens):
                self.pool.data[layer][:, :, first : first + count] = block[:, :, row : row + count]
                row += count

    def store(self, layer: int, at: int, k: Tensor, v: Tensor) -> None:
        """Store k and v, (tokens, kv_heads, head_dim), from slot `at` on."""
        row = 0
        for first, count in cut_ranges(self.slot_ranges, at, at + k.shape[0]):
            for plane, fresh in enumerate((k, v)):
                self.pool.data[layer, plane, :, first : first + count].copy_(fresh[row : row + count].transpose(0, 1))
            row += count

    def index(self, slots: Positions) -> _Index:
        """Return slots of the shard as an index into the pool's slots: a slice where they are contiguous."""
        if len(self.slot_ranges) > 1:
            slots = np.concatenate([np.arange(first, first + count) for first, count in self.slot_ranges])[slots]
        elif self.slot_ranges:
            slots = slots + self.slot_ranges[0][0]
        if np.all(np.diff(slots) == 1):
            return slice(int(slots[0]), int(slots[-1]) + 1)
        return torch.from_numpy(slots)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        pool = self.pool
        return KvPool.bytes_per_token(1, pool.kv_heads, pool.head_dim, pool.dtype)


class KvMoves:
    """KV moves of one rank, from one shard to another or within one, carried out layer by layer.

    Outgoing KV is copied when a layer is started, incoming KV is written when it is finished, so that a move may
    overwrite slots that it reads.
    """

    def __init__(
        self,
        transport: TensorTransport,
        moves: Sequence[KvMove],
        source: tuple[KvShard, range] | None,
        target: tuple[KvShard, range] | None,
    ) -> None:
        """source, target: the shards with the KV heads that they hold; None where this rank holds nothing."""
        self._transport = transport
        self._source, self._target = source, target
        rank = transport.rank
        stays = source is not None and target is not None and source[0] is target[0]
        self._out: list[tuple[int, range, _Index]] = []
        self._in: list[tuple[int, range, _Index, int]] = []
        for move in moves:
            # The same slots of the same storage: nothing to do.
            if stays and move.source == move.target and np.array_equal(move.from_slots, move.to_slots):
                continue
            if move.source == rank:
                assert source is not None, "a rank sends what it does not hold"
                heads = _moved(move.heads, -source[1].start)
                self._out.append((move.target, heads, source[0].index(move.from_slots)))
            if move.target == rank:
                assert target is not None, "a rank gets what it does not hold"
                heads = _moved(move.heads, -target[1].start)
                self._in.append((move.source, heads, target[0].index(move.to_slots), len(move.to_slots)))

    def __bool__(self) -> bool:
        return bool(self._out or self._in)

    def start(self, layer: int) -> Callable[[], None]:
        """Begin to move one layer; the returned function completes it."""
        rank = self._transport.rank
        out = [(peer, self._taken(layer, heads, index)) for peer, heads, index in self._out]
        own = [data for peer, data in out if peer == rank]
        into = [
            (peer, own.pop(0) if peer == rank else self._room(len(heads), tokens))
            for peer, heads, _, tokens in self._in
        ]
        wait = self._transport.exchange(
            [(peer, data) for peer, data in out if peer != rank],
            [(peer, data) for peer, data in into if peer != rank],
            MessageStream.HISTORY,
        )

        def finish() -> None:
            wait()
            for (_, heads, index, _), (_, data) in zip(self._in, into, strict=True):
                assert self._target is not None
                self._target[0].pool.data[layer][:, heads.start : heads.stop, index] = data

        return finish

    def _taken(self, layer: int, heads: range, index: _Index) -> Tensor:
        assert self._source is not None
        taken = self._source[0].pool.data[layer][:, heads.start : heads.stop, index]
        # A slice is a view, whose slots `finish` may overwrite before it is sent; indexing by a tensor copies already.
        return taken.clone(memory_format=torch.contiguous_format) if isinstance(index, slice) else taken

    def _room(self, heads: int, tokens: int) -> Tensor:
        shard = self._target or self._source
        assert shard is not None
        pool = shard[0].pool
        return torch.empty((2, heads, tokens, pool.head_dim), dtype=pool.dtype, device=pool.data.device)


def _moved(heads: range, by: int) -> range:
    return range(heads.start + by, heads.stop + by)
