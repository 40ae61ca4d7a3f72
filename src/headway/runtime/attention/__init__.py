"""Attention over a paged KV pool: the plan of a batch, its backends, and the merge of partial answers.

Start with `backend` (interface, primitive, merge), `backends` (for CPUs and for CUDA) and `native` (compiled kernels).

1. An iteration plans once and runs once a layer.
2. Partial answers over disjoint keys merge exactly, by their log-sum-exp, in fp32.
3. Compiled kernels are optional: without them everything runs on torch's own.
"""
