"""A model of vLLM's V1 engine, as of 0.32: `engine: vllm` in a scenario.

`scheduler` is its scheduler, `block_pool` its KV blocks and prefix cache, `plugged` Headway's policy at the seams of
`headway.vllm`, `engine` the engine's loop in virtual time. `tests/vllm/contract` compares their decisions with those of
vLLM's own classes.
"""
