"""Decisions. `iteration`: what one instance computes next. `placement`: on which instances a span is computed.
`hosted`: the iteration policy inside another engine's scheduler.

1. Policies are deterministic: time and predicted latency are arguments, ties have an order.
2. The simulator, live engines and vLLM run the same policy objects.
"""
