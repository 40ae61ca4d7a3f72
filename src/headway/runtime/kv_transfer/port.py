"""KV of requests in a worker's pool, as connectors read and write it, slice by slice.

KV of a request lies in one of two ways: under its own id in the order of its tokens (a scheduler's sequence, or what
one has left, or what has arrived), or as runs have left it, in the order of a layout of which others hold the rest.
Not a loop of its own: `runtime.cluster.agent` says when more is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headway.core.errors import ConfigError
from headway.kv.allocator import slots_of
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.engine.protocol import TransferEnd, rank_of
from headway.runtime.executor.worker import ModelWorker
from headway.runtime.kv_transfer.connector import Bytes, KvPart, KvPlace, SaveKv
from headway.runtime.kv_transfer.local import PeerConnector
from headway.runtime.sequence_parallel.attention import KvShard
from headway.runtime.sequence_parallel.layout import HeldShard, KvLayout, moves
from headway.runtime.sequence_parallel.spans import SpanExecutor, StoredKv

Slots = Sequence[tuple[int, int]]


@dataclass
class _SliceInFlight:
    """Tokens [start, end) on their way. `tokens`: those before this one have been given to the connector in all layers;
    of those from there to `until`, which are computed together, so many `layers`. `parts`: what of a layout goes of
    these, once that is known."""

    save: SaveKv
    start: int
    end: int
    layers: int = 0
    tokens: int = 0
    until: int = 0
    parts: list[KvPart] | None = field(default=None)


class KvPort:
    """The pool of the worker that is the end `rank` (`runtime.engine.protocol`).

    `runs`: the executor of span tasks here. `heads`: the worker's KV heads, where the instance is several processes.

    Raises ConfigError for a pool that is not in this host's memory.
    """

    def __init__(
        self,
        worker: ModelWorker,
        block_tokens: int,
        runs: SpanExecutor | None,
        connector: PeerConnector,
        rank: int,
        heads: range | None = None,
    ) -> None:
        if worker.pool.data.device.type != "cpu":
            raise ConfigError(f"device '{worker.pool.data.device}': KV moves between pools in host memory only")
        self._runs, self._connector, self._rank = runs, connector, rank
        self._pool, self._block = worker.pool, block_tokens
        self._heads = heads or range(worker.pool.kv_heads)
        self._cache = _bytes(worker.pool)
        self._pieces: dict[str, list[_SliceInFlight]] = {}
        self._awaited: dict[str, int] = {}
        self._opened: list[str] = []
        worker.on_free = self.settle

    # -- what comes ---------------------------------------------------------------------------------------------------

    def receive(self, request: str, tokens: int, blocks: Slots) -> None:
        """KV of so many tokens will come, in their order, into these runs of blocks."""
        self._awaited[request] = tokens
        place = KvPlace(self._cache, self._heads, tokens, self._slots(blocks))
        self._connector.update_state_after_alloc(request, place)
        self._opened.append(request)

    def awaits(self, request: str) -> bool:
        """Whether there is room for KV of the request that has not all come."""
        tokens = self._awaited.get(request)
        return tokens is not None and self._connector.get_num_new_matched_tokens(request) != tokens

    # -- what goes ----------------------------------------------------------------------------------------------------

    def send(self, save: SaveKv, start: int, end: int) -> None:
        """KV of tokens [start, end) is to go, as far as it lies or will lie here: `layers_are_there` or
        `tokens_are_there` follow, at once and whenever there may be more."""
        self._pieces.setdefault(save.request, []).append(_SliceInFlight(save, start, end, tokens=start))

    def sending(self) -> list[str]:
        """Requests of which pieces wait until more is there."""
        return list(self._pieces)

    def layers_are_there(self, request: str) -> None:
        """More may be there of a request that runs compute."""
        pieces = self._pieces.get(request)
        kept = self._runs.kept(request) if pieces and self._runs is not None else None
        if pieces is None or kept is None:
            return
        for piece in list(pieces):
            for layer, part in self._next_parts(piece, kept):
                self._connector.save_kv_layer(piece.save, layer, part)
            if piece.tokens >= piece.end:
                self._finish(piece)

    def _next_parts(self, piece: _SliceInFlight, kept: StoredKv) -> Iterator[tuple[int, KvPart]]:
        """Yield what can be sent now of a slice, by layer."""
        while piece.tokens < piece.end:
            if piece.parts is None:
                there = 1 + max((int(held.positions.max(initial=-1)) for held in kept.layout.values()), default=-1)
                until = min(piece.end, kept.whole if piece.tokens < kept.whole else there)
                if until <= piece.tokens:  # what computes them has not begun
                    return
                piece.until, piece.layers = until, 0
                piece.parts = self._parts(piece, kept.layout, kept.shard)
            # Tokens of earlier tasks have all layers; those of the task under way only the layers computed so far.
            layers = self._pool.layers if piece.until <= kept.whole else kept.layers
            for layer in range(piece.layers, layers):
                for part in piece.parts:
                    yield layer, part
            piece.layers = max(piece.layers, layers)
            if piece.layers < self._pool.layers:
                return
            # All layers of these tokens are sent: the next tokens may lie in another layout.
            piece.tokens, piece.parts = piece.until, None

    def tokens_are_there(self, request: str, tokens: int, blocks: Slots) -> None:
        """KV of the first `tokens` tokens, in their order in these runs of blocks."""
        for piece in list(self._pieces.get(request, ())):
            start, end = piece.tokens, min(piece.end, tokens)
            if start < end:
                positions = np.arange(start, end, dtype=np.int64)
                slots = slots_of(self._slots(blocks), positions)
                part = KvPart(self._cache, self._heads, 0, positions, slots)
                for layer in range(self._pool.layers):
                    self._connector.save_kv_layer(piece.save, layer, part)
                piece.tokens = end
            if piece.tokens >= piece.end:
                self._finish(piece)

    def settle(self, request: str) -> None:
        """Slots of the request's KV are about to be overwritten, or given to others."""
        self._connector.wait_for_save(request)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def opened(self) -> list[str]:
        """Requests of which room has been made since the last call: what may come now finds its place."""
        names, self._opened = self._opened, []
        return names

    def finished(self) -> list[TransferEnd]:
        """What has come to its end since the last call."""
        return self._connector.get_finished()

    def forget(self, request: str) -> None:
        """Nothing of a request is to come or go any more."""
        self._pieces.pop(request, None)
        self._awaited.pop(request, None)
        self._opened = [name for name in self._opened if name != request]
        self._connector.forget(request)

    def close(self) -> None:
        """End the connector."""
        self._connector.shutdown()

    def _parts(self, piece: _SliceInFlight, layout: KvLayout, shard: KvShard) -> list[KvPart]:
        """What this end sends of a piece. Heads that several instances have, one of them sends: all work out the same.
        Of those with several ranks each has the same heads as the others' rank of its number, and sends what its own
        instance is to."""
        wanted = HeldShard(self._heads, np.arange(piece.tokens, piece.until, dtype=np.int64))
        cache = self._cache if shard.pool is self._pool else _bytes(shard.pool)
        layout = {end: held for end, held in layout.items() if rank_of(end) == rank_of(self._rank)}
        held = layout.get(self._rank)
        return [
            KvPart(
                cache,
                move.heads,
                move.heads.start - held.heads.start,
                held.positions[move.from_slots],
                slots_of(shard.slot_ranges, move.from_slots),
            )
            for move in moves(layout, {piece.save.to: wanted})
            if held is not None and move.source == self._rank
        ]

    def _finish(self, piece: _SliceInFlight) -> None:
        self._connector.finish_save(piece.save)
        left = self._pieces[piece.save.request]
        left.remove(piece)
        if not left:
            del self._pieces[piece.save.request]

    def _slots(self, blocks: Slots) -> tuple[tuple[int, int], ...]:
        return tuple((first * self._block, count * self._block) for first, count in blocks)


def _bytes(pool: KvPool) -> Bytes:
    """A pool's memory."""
    found: Bytes = pool.data.view(torch.uint8).numpy()
    return found
