"""Tetris: chunked prefills with a dynamic degree of sequence parallelism (CDSP) over a cluster.

`setting` has the one setting of figures 8 to 13, `rates` the profiler of improvement rates (`headway profile rates`).
"""
