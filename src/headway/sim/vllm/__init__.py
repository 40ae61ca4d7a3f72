"""A model of vLLM's V1 engine, as of 0.32: `engine: vllm` in a scenario.

Start with `scheduler` (its scheduler and KV blocks) and `engine` (its loop in virtual time, with or without Headway's
policy).

1. `tests/vllm/contract` compares its decisions with those of vLLM's own classes.
2. Headway's policy runs here at the seams at which `headway.vllm` runs it in vLLM.
"""
