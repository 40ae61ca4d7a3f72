"""Accounting of KV memory: who owns which blocks. No tensors here (those are in `attention.kv_pool`)."""
