"""A cluster of servers that speak vLLM's HTTP API: `vllm serve`, with or without Headway's scheduler, `headway serve`.

Each instance serves whole requests. The placement policies and the controller (`headway.control`) are those of the
simulator and of native instances; what HTTP instances cannot do they declare (`HttpBackend.capabilities`).
"""
