"""What TTFT, TBT, TPOT, goodput and the rest mean, once, for the load client, the simulator and the reports.

Torch-free and clock-free: records hold times that someone else took, on any one clock, and everything here is a
function of records.
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
