"""Conversion of a batch's parts (one per KV group) to latency-model loads, and the predicted time of the batch."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.batch import GroupBatch
from headway.perf.latency.base import BatchLoad, LatencyModel, beside_prompts, load_s, one_chunk_s
from headway.perf.latency.shard_exchange import ShardExchangeCost

FREE = ShardExchangeCost()


def assist_s(model: LatencyModel, tokens: int, rows: int) -> float:
    """Return the attention seconds of `rows` rows over a shard of `tokens` cached tokens."""
    # A chunk over the shard, less the chunk's attention within itself.
    return max(0.0, one_chunk_s(model, tokens, rows) - one_chunk_s(model, 0, rows))


def part_load(model: LatencyModel, part: GroupBatch) -> BatchLoad:
    """Return the load of a part's own decodes and chunks, without its assists."""
    decodes = part.decodes
    count = len(decodes.members)
    load = BatchLoad(count, count, decodes.kv_sum)
    for chunk in part.prefills:
        # Cached tokens in this group only: those before `base` lie in other groups.
        past = chunk.start - chunk.base
        load = load.with_chunk(chunk.tokens, one_chunk_s(beside_prompts(model, load), past, chunk.tokens), past)
    return load


def batch_loads(
    model: LatencyModel, parts: Sequence[GroupBatch], exchange: ShardExchangeCost = FREE
) -> list[BatchLoad]:
    """Return one load per part.

    An assisting part also attends rows of other groups' requests (a decode's row as a decode); both sides of an
    exchange pay its cost."""
    loads = [part_load(model, part) for part in parts]
    if len(parts) == 1:
        return loads
    chunked = {chunk.request for part in parts for chunk in part.prefills}
    # Rows that each group sends or receives, counted once per remote group.
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
    """Return the seconds of a batch: those of its slowest part."""
    return max(load_s(model, load) for load in batch_loads(model, parts, exchange))
