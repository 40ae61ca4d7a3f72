"""Division of a span task into successive chunks on one group, which bounds the rows computed at once.

Between the chunks of a task no KV moves (`core.span.cut`). Cost: a ring passes all KV so far once for each chunk, so n
chunks at the beginning of a prompt pass (n + 1) / 2 times the KV of one. Gain: activations are those of a chunk, and so
is the duration of a layer, for which a pause or a message waits.
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
    """Return `spec` as chunks of at most `rows` rows a TP region; undivided for 0, and in place, where rows are few."""
    if not rows or spec.in_place:
        return (spec,)
    regions = len(spec.group.ranks) // spec.group.tp
    edges = cut(spec.start, spec.end, regions, rows)
    return tuple(msgspec.structs.replace(spec, start=start, end=end) for start, end in edges)


def layout_after(chunks: Sequence[ChunkSpec], held: KvLayout, config: DecoderConfig) -> KvLayout:
    """Return the KV layout after all chunks of a task: the same as from one `ChunkPlan` after the other.

    That is history, balanced once, followed by each member's tokens of chunk after chunk. Raises ConfigError.
    """
    first = chunks[0]
    first.check(config)
    history = history_of(held, first, config)
    # History is balanced once, before the first chunk; between the chunks of a task KV does not move.
    shares = [spread(one.start, one.tokens, one.members, one.order) for one in chunks]
    return extended(history, first, [np.concatenate(fresh) for fresh in zip(*shares, strict=True)])
