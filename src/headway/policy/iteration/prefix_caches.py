"""Construction of prefix caches whose eviction knows what blocks cost to compute again."""

from __future__ import annotations

from headway.kv.eviction import make_eviction
from headway.kv.prefix_cache import PrefixCache
from headway.perf.latency.base import LatencyModel, one_chunk_s


def make_prefix_cache(
    eviction: str, latency: LatencyModel, block_tokens: int, unused_blocks: int | None = None
) -> PrefixCache:
    """Return an empty cache with a policy of eviction by name. `unused_blocks`: see `PrefixCache`."""

    def block_s(depth: int) -> float:
        return latency.rows_s(block_tokens) + one_chunk_s(latency, block_tokens * (depth - 1), block_tokens)

    return PrefixCache(make_eviction(eviction, block_s), block_tokens, unused_blocks)
