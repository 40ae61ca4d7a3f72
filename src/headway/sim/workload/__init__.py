"""Workloads: traces, length distributions, arrival processes, and presets that combine them.

Start with `traces` (what a request of a trace is), `generate` and `transforms`.

1. All randomness comes from a numpy Generator that the caller seeds.
2. The load client and the simulator take the same `TraceRequest`s.
"""

from headway.sim.workload.traces import RequestTrace, TraceError, TraceRequest

__all__ = ["RequestTrace", "TraceError", "TraceRequest"]
