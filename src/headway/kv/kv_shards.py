"""Shards: the runs of a long request's KV that lie in groups which no longer compute its rows (Medha §3.3, KVP).

A request starts in one group. When its share there is full, another group takes over its rows and begins a new shard;
shards are in order, adjacent, and never change afterwards. They are leases like any other of their group's ledger.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.kv.block_manager import BlockManager, KvLease


class KvShardLease(NamedTuple):
    """Tokens [start, start + tokens) of a request, in the ledger of `group`."""

    group: int
    ledger: BlockManager
    lease: KvLease
    start: int
    tokens: int
