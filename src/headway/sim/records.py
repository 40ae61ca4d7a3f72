"""Conversion of a simulated request to the `RequestRecord` that all metrics are computed from."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from headway.core.request import Request
from headway.perf.latency.serving_overhead import ServingOverhead
from headway.sim.metrics import RequestRecord, SloTargets
from headway.sim.workload import TraceRequest


class SimulatedRequest(Protocol):
    """The progress of a request, as both simulators keep it."""

    request: Request
    source: TraceRequest
    times: list[float]
    """Times of the output tokens, virtual seconds."""
    scheduled_s: float | None
    ended_s: float | None
    error: str | None
    """Reason for ending without all of the output; None otherwise."""
    rejected: bool
    """Whether the request was refused before it was scheduled."""
    cached_tokens: int
    """Tokens of the prompt that were cached when it was scheduled."""


def record_of(one: SimulatedRequest, targets: SloTargets) -> RequestRecord:
    """Return the record of a request. One that has not ended gets the error "unfinished"."""
    # reports count errors by the text before the colon
    error = f"rejected: {one.error}" if one.rejected else one.error
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
        cached_tokens=one.cached_tokens,
    )


def later(record: RequestRecord, serving: ServingOverhead) -> RequestRecord:
    """Return the record with all but its arrival later: as the client sees a server's."""
    if not serving.request_s:
        return record
    by_s = serving.way_s(f"{record.id} {record.arrival_s}")
    return replace(
        record,
        scheduled_s=None if record.scheduled_s is None else record.scheduled_s + by_s,
        token_s=tuple(at_s + by_s for at_s in record.token_s),
        finish_s=None if record.finish_s is None else record.finish_s + by_s,
    )
