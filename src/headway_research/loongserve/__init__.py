"""LoongServe (arXiv 2404.09526): elastic sequence parallelism over a pool of instances, or over prefill instances
alone.

Start with `policy`; `pool` is one pool's scheduler, `batching` its decisions about batches.
"""
