"""Attention over a paged KV pool: the plan of a batch, its backends, and the merge of partial answers.

`base` is the interface that an iteration sees: plan once, run once a layer. `cpu` and `sdpa` are its backends, `native`
the compiled kernels for bf16 on processors that have the instructions. `primitive` is attention of given rows over
given keys with the log-sum-exp, which KV parallelism and sequence parallelism merge.
"""
