"""KV operations carried out on block tables."""

from __future__ import annotations

from headway.core.batch import KvOp
from headway.kv.block_allocator import BlockTables


def apply_ops(tables: BlockTables, ops: tuple[KvOp, ...]) -> None:
    for op in ops:
        if op.verb == "reassign":
            tables.reassign(op.before, op.request)
        else:
            tables.free(op.request) if op.verb == "free" else tables.add(op.request, op.blocks)
