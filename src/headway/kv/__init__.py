"""Accounting of KV memory: the owner of each block. No tensors (those are in `runtime.attention.kv_pool`).

Start with `allocator`, `block_manager` and `prefix_cache`.

1. A block is free, or has an owner; `BlockManager.check()` proves it.
2. The same operations in the same order give the same blocks, so executors replay them and no table is sent.
3. A waiting request holds no block; what it would find in the cache follows as blocks come and go.
"""
