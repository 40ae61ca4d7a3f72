"""Size of the shards of a request that KV groups hold (Medha §3.3: groups join as the context grows, append-only).

The limit is given in tokens or derived from the time of an iteration: the largest cache whose decode fits. A request
that K such shards do not hold gets K equal ones. Departure from DESIGN.md §4: a chunk is cut at the edge of a shard
and never straddles it.
"""

from __future__ import annotations

from headway.core.request import Request
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import LatencyModel
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.efficient_chunks import reference_aim_s
from headway.policy.iteration.prefill import WHOLE


def shard_tokens(config: SchedulerConfig, latency: LatencyModel, block_manager: BlockManager) -> int:
    """Return the limit of a shard in tokens: whole blocks, at least one, at most the pool."""
    given = config.kv_shard_tokens
    if given is None:
        given = _decodable(reference_aim_s(config, latency), latency, block_manager.total_tokens)
    return max(1, min(given, block_manager.total_tokens) // block_manager.block_tokens) * block_manager.block_tokens


def limit_of(request: Request, shard: int, groups: int, block_tokens: int) -> int:
    """Return the limit of this request's shards in tokens; WHOLE if one shard holds it: it never leaves its group."""
    # KV of the last output token is never read: max_output - 1, but one token at least.
    need = request.prompt_tokens + max(1, request.max_output_tokens - 1)
    if need <= shard:
        return WHOLE
    # A request too long for the usual shards gets one equal shard a group, rounded up to whole blocks.
    share = -(-need // groups)
    return max(shard, -(-share // block_tokens) * block_tokens)


def _decodable(t_target_s: float, latency: LatencyModel, most: int) -> int:
    """Return the largest number of cached tokens over which one decode takes at most `t_target_s`; at most `most`."""
    one_s = latency.rows_s(1)
    # Invariant: a decode over `low` tokens fits the time, one over `high` does not (or `high` is out of range).
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if one_s + latency.decode_s(1, middle) <= t_target_s:
            low = middle
        else:
            high = middle
    return low
