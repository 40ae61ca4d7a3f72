"""Accounting of KV memory: who owns which blocks. No tensors here (those are in `runtime.attention.kv_pool`)."""
