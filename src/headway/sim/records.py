"""What a simulated request becomes in the end: the record that all metrics are made from."""

from __future__ import annotations

from typing import Protocol

from headway.core.request import Request
from headway.sim.metrics import RequestRecord, SloTargets
from headway.sim.workload import TraceRequest


class SimulatedRequest(Protocol):
    """How far a request has come."""

    request: Request
    source: TraceRequest
    times: list[float]
    """Of its output tokens."""
    scheduled_s: float | None
    ended_s: float | None
    error: str | None
    """Why it ended without all of its output."""
    rejected: bool
    """It was refused, not started."""


def record_of(one: SimulatedRequest, targets: SloTargets) -> RequestRecord:
    """Its record. What has not ended is unfinished, which is an error too."""
    error = f"rejected: {one.error}" if one.rejected else one.error  # reports count errors by what precedes the colon
    request, done = one.request, one.ended_s is not None and one.error is None
    return RequestRecord(
        id=request.id,
        klass=one.source.klass,
        arrival_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=len(one.times),
        sent_s=request.arrival_s,
        scheduled_s=one.scheduled_s,
        token_s=tuple(one.times),
        finish_s=one.ended_s if done else None,
        slo=targets,
        finish_reason="length" if done else None,
        error=None if done else error or "unfinished",
        rejected=one.rejected,
    )
