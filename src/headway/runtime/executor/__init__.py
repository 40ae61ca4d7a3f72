"""Executors carry out batches on a model: in one process, or over tensor-parallel, pipeline and KV-parallel ranks.

Start with `worker` (a batch on one rank), `multi_process` (the engine's end) and `plans` (what passes between them).

1. A rank derives block tables and batches from a stream of plans; no table is sent.
2. All ranks of a group carry out the same plans in the same order.
3. The engine keeps what new ranks need to go on where others were lost.
"""
