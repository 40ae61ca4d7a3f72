"""What is asked of a server: traces, length distributions, arrival processes, and named mixes of them.

Torch-free and clock-free; all randomness comes from a numpy Generator that the caller seeds. The load client and the
simulator take the same `TraceRequest`s.
"""

from headway.sim.workload.request import RequestTrace, TraceError, TraceRequest

__all__ = ["RequestTrace", "TraceError", "TraceRequest"]
