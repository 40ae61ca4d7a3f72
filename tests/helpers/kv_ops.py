"""KV operations carried out on block tables."""

from __future__ import annotations

from headway.core.batch import KvOp
from headway.kv.allocator import BlockTables


def apply_ops(tables: BlockTables, ops: tuple[KvOp, ...]) -> None:
    for op in ops:
        tables.apply(op)
