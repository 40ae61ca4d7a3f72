"""Executors carry out batches on a model: in one process, or over tensor-parallel, pipeline and KV-parallel ranks.

The engine's end is `single_process` or `multi_process`; a rank's end is `rank_process`, `rank_loop` and `worker`. The
engine sends every rank a stream of plans (`plan_stream`), from which each rank derives block tables and batches itself.
"""
