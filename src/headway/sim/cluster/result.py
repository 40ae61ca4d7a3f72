"""What a cluster run leaves: the simulator's usual result, and bars for a picture of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from headway.policy.placement.view import ClusterInstance
from headway.sim.result import SimResult

BarKind = Literal["span", "hold", "pause", "transfer", "batch"]


class GanttBar(NamedTuple):
    """Something that took time on an instance. A transfer's instance is its sender, and `note` says where to. `batch`:
    its scheduler computed without a break; no request is named."""

    kind: BarKind
    instance: int
    start_s: float
    end_s: float
    request: str
    note: str = ""


@dataclass(frozen=True)
class ClusterResult:
    """`sim` has the records. spans, chunked: spans that ran, and requests that had more than one; paused: preemptions;
    refused: actions that were. decision_s: seconds that each call of the policy took, where a stopwatch was given."""

    sim: SimResult
    instances: tuple[ClusterInstance, ...] = ()
    bars: tuple[GanttBar, ...] = ()
    spans: int = 0
    chunked: int = 0
    paused: int = 0
    refused: int = 0
    busy_s: tuple[float, ...] = ()
    decision_s: tuple[float, ...] = field(default=(), repr=False)
