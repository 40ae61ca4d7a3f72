"""The requests of an event log as a workload: of a server's recorded traffic, for simulations and plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway.sim.metrics import RequestRecord
from headway.sim.replay import read_log, replay
from headway.sim.replayed_run import ReplayedRun
from headway.sim.workload import TraceRequest
from headway.sim.workload.trace_request import RequestTrace, TraceError

_START = b'{"event":"start"'


def is_event_log(path: Path) -> bool:
    """Return whether a file begins as an event log does. False for one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_START)) == _START
    except OSError:
        return False


def requests_in(run: ReplayedRun, records: Sequence[RequestRecord]) -> list[TraceRequest]:
    """Return recorded requests, which arrive in this order, with times from the first one's arrival."""
    zero_s = records[0].arrival_s if records else 0.0
    asked = run.requests
    return [
        TraceRequest(
            r.arrival_s - zero_s,
            r.prompt_tokens,
            r.output_tokens,
            r.klass,
            asked[r.id].cached_tokens,
            priority=asked[r.id].priority,
        )
        for r in records
    ]


def recorded_trace(path: Path) -> RequestTrace:
    """Return the requests of a log that were answered, with the lengths of their answers. Raises ConfigError."""
    run = replay(read_log(path))
    answered = sorted((record for record in run.records if record.ok), key=lambda record: record.arrival_s)
    if not answered:
        raise TraceError(f"{path}: no request of this event log was answered")
    return RequestTrace(path.name, "event log", tuple(requests_in(run, answered)))
