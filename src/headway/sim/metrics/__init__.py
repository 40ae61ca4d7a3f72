"""Definitions of TTFT, TBT, TPOT, goodput and percentiles, shared by the load client, the simulator and the reports.

Torch-free and clock-free: every figure is a function of `RequestRecord`s, whose times may come from any one clock.
`definitions` has the latencies of one request, `quantiles` the percentile, `summary` the figures of a run by class.
"""

from headway.sim.metrics.record import NO_TARGETS, RequestRecord, SloTargets
from headway.sim.metrics.summary import SCHEMA, ClassSummary, RunSummary, summarise

__all__ = [
    "NO_TARGETS",
    "SCHEMA",
    "ClassSummary",
    "RequestRecord",
    "RunSummary",
    "SloTargets",
    "summarise",
]
