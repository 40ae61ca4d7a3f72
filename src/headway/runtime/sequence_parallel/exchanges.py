"""The exchanges of activations in one chunk, given the rows that each rank keeps. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from headway.runtime.model.config import DecoderConfig
from headway.runtime.model.shard import ModelShard
from headway.runtime.sequence_parallel.group import ChunkSpec
from headway.runtime.sequence_parallel.steps import ROWS, ExchangeRows, Pairs, RegisterSlice, exchange
from headway.runtime.sequence_parallel.tokens import Positions

NOTHING: Pairs = ((), ())


class ChunkExchanges:
    """Exchanges of the rank at `index` of the chunk's group. rows: the positions of every rank's rows, by index."""

    def __init__(self, spec: ChunkSpec, config: DecoderConfig, rows: Sequence[Positions], index: int) -> None:
        self._spec, self._config, self._rows, self._index = spec, config, rows, index
        self._ranks = spec.group.ranks
        self._region = spec.group.region(index)
        first = index // spec.width * spec.width
        self._node = range(first, first + spec.width)

    def gather(self, source: str, target: str) -> ExchangeRows:
        """All-gather: every rank of the region gets all of the region's rows."""
        at, width = self._offsets(self._region), self._config.hidden_size

        def between(i: int, j: int) -> Pairs:
            count = len(self._rows[i])
            return (RegisterSlice(0, count, 0, width),), (RegisterSlice(at[i], at[i] + count, 0, width),)

        return exchange(source, target, (at[-1], width), self._index, self._region, self._ranks, between)

    def scatter(self, source: str, target: str) -> ExchangeRows:
        """Reduce-scatter: each rank of the region gets the sum of all ranks' results for its rows."""
        at, width = self._offsets(self._region), self._config.hidden_size

        def between(i: int, j: int) -> Pairs:
            count = len(self._rows[j])
            return (RegisterSlice(at[j], at[j] + count, 0, width),), (RegisterSlice(0, count, 0, width),)

        shape = (len(self._rows[self._index]), width)
        return exchange(source, target, shape, self._index, self._region, self._ranks, between, add=True)

    def to_heads(self, source: str, target: str) -> ExchangeRows:
        """All-to-all before attention: from all heads of own rows to own heads of all of the node's rows."""
        config, at, dim = self._config, self._offsets(self._node), self._config.head_dim

        def between(i: int, j: int) -> Pairs:
            shard, count = self._spec.heads(j), len(self._rows[i])
            q, kv = shard.q_heads(config), shard.kv_heads(config)
            out, into, to = [], [], 0
            for heads, before in ((q, 0), (kv, config.q_heads), (kv, config.q_heads + config.kv_heads)):
                out.append(RegisterSlice(0, count, (before + heads.start) * dim, (before + heads.stop) * dim))
                into.append(RegisterSlice(at[i], at[i] + count, to, to + len(heads) * dim))
                to += len(heads) * dim
            return tuple(out), tuple(into)

        shard = self._spec.heads(self._index)
        columns = (len(shard.q_heads(config)) + 2 * len(shard.kv_heads(config))) * dim
        return exchange(source, target, (at[-1], columns), self._index, self._node, self._ranks, between)

    def to_rows(self, source: str, target: str) -> ExchangeRows:
        """All-to-all after attention: from own heads of all of the node's rows to all heads of own rows."""
        config, at, dim = self._config, self._offsets(self._node), self._config.head_dim

        def between(i: int, j: int) -> Pairs:
            count, heads = len(self._rows[j]), self._spec.heads(i).q_heads(config)
            return (
                (RegisterSlice(at[j], at[j] + count, 0, len(heads) * dim),),
                (RegisterSlice(0, count, heads.start * dim, heads.stop * dim),),
            )

        shape = (len(self._rows[self._index]), config.q_heads * dim)
        return exchange(source, target, shape, self._index, self._node, self._ranks, between)

    def last_rows(self, target: str, wanted: Sequence[int]) -> ExchangeRows:
        """Send the rows at positions `wanted` from the ranks that have them to every rank of the first region."""
        width, readers = self._config.hidden_size, self._spec.group.region(0)
        at = [np.flatnonzero(np.isin(rows, wanted)) for rows in self._rows]
        to = [[wanted.index(position) for position in rows[own]] for rows, own in zip(self._rows, at, strict=True)]

        def between(i: int, j: int) -> Pairs:
            if j not in readers:
                return NOTHING
            out = tuple(RegisterSlice(int(row), int(row) + 1, 0, width) for row in at[i])
            return out, tuple(RegisterSlice(row, row + 1, 0, width) for row in to[i])

        everyone = range(len(self._ranks))
        return exchange(ROWS, target, (len(wanted), width), self._index, everyone, self._ranks, between)

    def logits(self, source: str, target: str, rows: int) -> ExchangeRows:
        """Gather the first region's slices of the vocabulary side by side on the first rank."""
        config, tp = self._config, self._spec.group.tp

        def between(i: int, j: int) -> Pairs:
            if j:
                return NOTHING
            vocabulary = ModelShard(i, tp).vocabulary(config)
            return (RegisterSlice(0, rows, 0, len(vocabulary)),), (
                RegisterSlice(0, rows, vocabulary.start, vocabulary.stop),
            )

        shape = (rows, config.vocab_size)
        return exchange(source, target, shape, self._index, self._spec.group.region(0), self._ranks, between)

    def _offsets(self, indices: Sequence[int]) -> _RowOffsets:
        return _RowOffsets(indices, [len(self._rows[i]) for i in indices])


class _RowOffsets:
    """Offsets of each rank's rows when those of `indices` are concatenated; [-1] is the total."""

    def __init__(self, indices: Sequence[int], sizes: Sequence[int]) -> None:
        edges = accumulate(sizes, initial=0)
        self._at = dict(zip([*indices, -1], edges, strict=True))

    def __getitem__(self, index: int) -> int:
        return self._at[index]
