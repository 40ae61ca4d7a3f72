"""Workloads: traces, length distributions, arrival processes, and presets that combine them.

Torch-free and clock-free; all randomness comes from a numpy Generator that the caller seeds. The load client and the
simulator take the same `TraceRequest`s. `readers` parses public trace formats, `transforms` and `rewriting` change a
workload that has been read, `specs` parses distributions as a command line writes them.
"""

from headway.sim.workload.trace_request import RequestTrace, TraceError, TraceRequest

__all__ = ["RequestTrace", "TraceError", "TraceRequest"]
