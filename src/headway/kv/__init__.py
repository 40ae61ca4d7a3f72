"""Accounting of KV memory: the owner of each block. No tensors (those are in `runtime.attention.kv_pool`)."""
