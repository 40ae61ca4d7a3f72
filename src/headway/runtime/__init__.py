"""The native engine and its clusters: all that computes tokens with torch, sockets, processes and a wall clock.

An instance is an `engine` (scheduling loop and its process) over an `executor` (ranks that run a `model` with an
`attention` backend). A `cluster` is several instances behind one controller, started by the `launcher`, with KV moved
between them by `kv_transfer` and long prompts computed on several of them by `sequence_parallel`. `build` composes all
of it from settings.
"""
