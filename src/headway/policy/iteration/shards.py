"""How much of a request one KV group holds (Medha §3.3: groups are added as the context grows, append-only).

The limit is given in tokens or derived from the time of an iteration: the largest cache whose decode fits. A request
that K such shards do not hold gets K equal ones. Departure from DESIGN.md §4: a chunk is cut at the edge of a shard
and never straddles it.
"""

from __future__ import annotations

from headway.core.request import Request
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import LatencyModel
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.prefill import WHOLE


def shard_tokens(config: SchedulerConfig, latency: LatencyModel, ledger: BlockManager) -> int:
    """The limit of a shard: whole blocks, at least one, at most the ledger."""
    given = config.kv_shard_tokens
    tokens = given if given is not None else _decodable(config.t_target_s, latency, ledger.total_tokens)
    return max(1, min(tokens, ledger.total_tokens) // ledger.block_tokens) * ledger.block_tokens


def limit_of(request: Request, shard: int, groups: int, block_tokens: int) -> int:
    """The limit of this request's shards; WHOLE when it needs one only, and so never leaves its group."""
    need = request.prompt_tokens + max(1, request.max_output_tokens - 1)
    if need <= shard:
        return WHOLE
    share = -(-need // groups)
    return max(shard, -(-share // block_tokens) * block_tokens)


def _decodable(t_target_s: float, latency: LatencyModel, most: int) -> int:
    """The largest cache over which one decode takes at most `t_target_s`."""
    one_s = latency.rows_s(1)
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if one_s + latency.decode_s(1, middle) <= t_target_s:
            low = middle
        else:
            high = middle
    return low
