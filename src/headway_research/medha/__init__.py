"""Medha and its earlier version Mnemosyne: chunked prefills, stream pipelines, KV parallelism, LARS.

`setting` has the one setting of all figures that simulate a workload, `arithmetic` the times that need no scheduler,
`kvp` one request alone on KV groups.
"""
