"""A batch's parts as loads: the one place where what a group does is turned into what a latency model is asked."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.batch import GroupBatch
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s, one_chunk_s
from headway.perf.latency.shard_exchange import ShardExchangeCost

FREE = ShardExchangeCost()


def assist_s(model: LatencyModel, tokens: int, rows: int) -> float:
    """Attention of so many rows over a shard of `tokens`: a chunk's, less what it attends within itself."""
    return max(0.0, one_chunk_s(model, tokens, rows) - one_chunk_s(model, 0, rows))


def part_load(model: LatencyModel, part: GroupBatch) -> BatchLoad:
    """The load of a part that exchanges nothing with others."""
    decodes = part.decodes
    count = len(decodes.members)
    load = BatchLoad(count, count, decodes.kv_sum)
    for chunk in part.prefills:
        past = chunk.start - chunk.base
        load = load.with_chunk(chunk.tokens, one_chunk_s(model, past, chunk.tokens), past)
    return load


def batch_loads(
    model: LatencyModel, parts: Sequence[GroupBatch], exchange: ShardExchangeCost = FREE
) -> list[BatchLoad]:
    """One load a part. A part that assists attends others' rows besides its own (a decode's as a decode); whoever
    takes part in an exchange pays for it."""
    loads = [part_load(model, part) for part in parts]
    if len(parts) == 1:
        return loads
    chunked = {chunk.request for part in parts for chunk in part.prefills}
    crossing = dict.fromkeys((part.group for part in parts), 0)
    for i, part in enumerate(parts):
        for assist in part.assists:
            crossing[part.group] += assist.rows
            crossing[assist.owner] += assist.rows
            load = loads[i]
            if assist.request in chunked:
                loads[i] = load.with_chunk(0, assist_s(model, assist.tokens, assist.rows))
            else:
                loads[i] = BatchLoad(load.tokens, load.decodes + 1, load.decode_kv + assist.tokens, load.chunk_s)
    return [load.with_chunk(0, exchange.seconds(crossing[part.group])) for load, part in zip(loads, parts, strict=True)]


def parts_s(model: LatencyModel, parts: Sequence[GroupBatch], exchange: ShardExchangeCost = FREE) -> float:
    """Seconds of a batch: its slowest part's."""
    return max(load_s(model, load) for load in batch_loads(model, parts, exchange))
