"""The requests of an event log as a trace, so that what a server was sent can be simulated and planned for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headway.control.log_reader import SCHEMAS
from headway.control.log_reader import read_log as read_decisions
from headway.core.errors import ConfigError
from headway.sim.replay import read_log, replay
from headway.sim.workload import TraceRequest, transforms
from headway.sim.workload.trace_request import RequestTrace


def recorded_trace(path: Path) -> RequestTrace | None:
    """Return the requests of an engine's, a plug-in's or a cluster's log, in order of arrival; None for a file that is
    no event log.

    Answers have as many tokens as they had in an engine's log, those cut off too; in a cluster's, which does not count
    them, as many as they were allowed. Raises ConfigError for a log without requests, or one that cannot be replayed.
    """
    first = _first_line(path)
    if first.get("schema") in SCHEMAS:
        requests = _of_a_cluster(path)
    elif first.get("event") == "start":
        requests = _of_an_engine(path)
    else:
        return None
    if not requests:
        raise ConfigError(f"{path} has no requests yet: name the log of a run that was sent some")
    requests.sort(key=lambda request: request.arrival_s)
    return RequestTrace(path.name, "event log", tuple(transforms.rebase(requests)), has_arrivals=True)


def _first_line(path: Path) -> dict[str, Any]:
    """Return the first line, or {} if it is no JSON object or cannot be read (`read_trace` says why)."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.readline(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _of_an_engine(path: Path) -> list[TraceRequest]:
    run = replay(read_log(path))
    if run.differences:
        raise ConfigError(f"{path}: this version decides otherwise than the recorded run: {run.differences[0]}")
    return [
        TraceRequest(one.arrival_s, one.prompt_tokens, max(1, len(one.token_s)), cached_tokens=one.cached_tokens)
        for one in run.records
        # what was refused has no answer whose length could be known
        if not one.rejected
    ]


def _of_a_cluster(path: Path) -> list[TraceRequest]:
    calls = read_decisions(path.read_bytes().splitlines(keepends=True)).callbacks
    arrived = [call["request"] for _, call in calls if call["do"] == "arrive"]
    # another attempt at a request is no new one: they are named id#1, id#2, …; the first has the client's arrival
    first: dict[str, dict[str, Any]] = {}
    for request in arrived:
        first.setdefault(request["id"].rpartition("#")[0] or request["id"], request)
    return [TraceRequest(one["arrival_s"], one["prompt_tokens"], one["max_output_tokens"]) for one in first.values()]
