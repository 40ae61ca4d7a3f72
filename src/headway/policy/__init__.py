"""Decisions. `iteration`: what one instance computes next. `placement`: on which instances a span is computed.
`hosted`: the iteration policy inside another engine's scheduler.

Policies are deterministic state machines over events: time and predicted latency are arguments.
"""
