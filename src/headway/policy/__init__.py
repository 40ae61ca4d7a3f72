"""Decisions. `iteration`: what one instance computes next. `placement`: on which instances a span is computed.

Policies are deterministic state machines over events: time and predicted latency are arguments.
"""
