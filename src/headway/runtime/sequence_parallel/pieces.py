"""A run of a prompt as chunks that follow each other on one group, so that what is computed at once is bounded.

Between the chunks of a run no KV moves (`core.span.cut`). What a cut costs: a ring passes all KV so far once a chunk,
so that n chunks of a run that begins a prompt pass (n + 1) / 2 times what one would. What it gives: rows between two
layers are those of a chunk, and a layer, which is how long a pause or a message waits, is a chunk's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headway.core.span import cut
from headway.runtime.model.config import DecoderConfig
from headway.runtime.sequence_parallel.group import ChunkSpec
from headway.runtime.sequence_parallel.layout import KvLayout, extended, history_of
from headway.runtime.sequence_parallel.tokens import spread


def pieces(spec: ChunkSpec, rows: int) -> tuple[ChunkSpec, ...]:
    """`spec` as chunks of at most `rows` rows a TP region; itself where 0 is said, or where KV stays in place (rows
    are few there)."""
    if not rows or spec.in_place:
        return (spec,)
    regions = len(spec.group.ranks) // spec.group.tp
    edges = cut(spec.start, spec.end, regions, rows)
    return tuple(msgspec.structs.replace(spec, start=start, end=end) for start, end in edges)


def layout_after(chunks: Sequence[ChunkSpec], held: KvLayout, config: DecoderConfig) -> KvLayout:
    """Who holds what once all chunks of a run are computed: history balanced once, and then each member's tokens of
    chunk after chunk. What one `ChunkPlan` after the other comes to. Raises ConfigError as they do."""
    first = chunks[0]
    first.check(config)
    history = history_of(held, first, config)
    # History is balanced once, before the first chunk; between the chunks of a task KV does not move.
    shares = [spread(one.start, one.tokens, one.members, one.order) for one in chunks]
    return extended(history, first, [np.concatenate(fresh) for fresh in zip(*shares, strict=True)])
