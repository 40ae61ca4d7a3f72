"""KV shards of long requests in groups that no longer compute their rows (Medha §3.3, KVP).

A request starts in one group. When its share there is full, another group takes over its rows and begins a new shard;
shards are in order, adjacent, and never change afterwards. Each is a lease of its group's block manager.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.kv.block_manager import BlockManager, KvLease


class KvShardLease(NamedTuple):
    """Tokens [start, start + tokens) of a request, leased from the block manager of `group`."""

    group: int
    block_manager: BlockManager
    lease: KvLease
    start: int
    tokens: int
