"""The native engine and its clusters: all that computes tokens with torch, sockets, processes and a wall clock.

Start with `engine.core` (schedule, execute, update), `executor.worker` (a batch on a model) and `cluster.driver` (the
controller over live instances).

1. An instance is an `engine` over an `executor` that runs a `model` with an `attention` backend; `assembly` composes
   it, `launcher` starts its processes, `kv_transfer` and `sequence_parallel` join several of them.
2. The server's process and the engine's loop never import torch where ranks are processes of their own.
3. A lost process loses no request: its requests are computed again from the tokens that clients have.
"""
