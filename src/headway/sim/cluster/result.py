"""The result of a cluster run: a `SimResult`, counters of the controller, and bars for a Gantt chart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from headway.policy.placement.view import ClusterInstance
from headway.sim.result import SimResult

BarKind = Literal["span", "hold", "pause", "transfer", "batch"]


class GanttBar(NamedTuple):
    """One bar of a Gantt chart."""

    kind: BarKind
    """"batch": a stretch of scheduler iterations without a break."""
    instance: int
    """Instance id; of a transfer, the sender."""
    start_s: float
    end_s: float
    request: str
    """Empty for batches."""
    note: str = ""
    """Of a transfer, its target; of a span, its tokens."""


@dataclass(frozen=True)
class ClusterResult:
    """One simulated cluster run."""

    sim: SimResult
    instances: tuple[ClusterInstance, ...] = ()
    bars: tuple[GanttBar, ...] = ()
    """Empty unless they were kept."""
    spans: int = 0
    """Spans that ran."""
    chunked: int = 0
    """Requests that had more than one span."""
    paused: int = 0
    """Preemptions of spans."""
    refused: int = 0
    """Actions of the policy that were refused."""
    busy_s: tuple[float, ...] = ()
    """By instance."""
    decision_s: tuple[float, ...] = field(default=(), repr=False)
    """Seconds of each call of the policy, where a stopwatch was given."""
