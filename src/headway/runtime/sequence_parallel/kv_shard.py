"""One rank's keys and values of one prompt: slots of a pool, in the order of a layout's positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.slots import cut_ranges
from headway.runtime.sequence_parallel.layout import KvMove
from headway.runtime.sequence_parallel.tokens import Positions
from headway.runtime.sequence_parallel.transport import MessageStream, TensorTransport

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
