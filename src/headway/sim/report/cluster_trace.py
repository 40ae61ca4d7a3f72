"""Trace events of a cluster's logs, for ui.perfetto.dev: a process for each instance, with threads for the spans that
it computed in groups, the iterations of its scheduler (by KV group and stage) and the KV that it received.

A track of requests comes first. Times are microseconds from the first arrival or begin, as the format requires.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headway.sim.cluster_log import ClusterLogRun
from headway.sim.report.live_trace import REQUESTS, LiveTimeline, duration_event, meta_event, microseconds, timeline

_SPANS, _RECEIVED, _FIRST_STAGE = 1, 2, 3
"""Threads of an instance."""


def cluster_trace_events(run: ClusterLogRun) -> dict[str, Any]:
    """Return the JSON object that Perfetto and chrome://tracing load. Raises ConfigError on a log of an older version,
    without times by stage."""
    timelines = {instance: timeline(events) for instance, events in run.batches.items()}
    starts = [life.request.arrival_s for life in run.requests.values()] + [one.start_s for one in run.spans]
    starts += [one.start_s for each in timelines.values() for one in each.slices]
    zero = min(starts, default=0.0)
    events = [*_names(run, timelines), *_spans(run, zero), *_transfers(run, zero), *_requests(run, zero)]
    for instance, trace in timelines.items():
        events += _iterations(instance, trace, zero)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(run: ClusterLogRun, timelines: dict[int, LiveTimeline]) -> Iterator[dict[str, Any]]:
    yield meta_event("process_name", REQUESTS, 0, "requests")
    for one in run.instances:
        process = one.id + 1
        yield meta_event("process_name", process, 0, f"instance {one.id} ({one.role}, node {one.node})")
        yield meta_event("thread_name", process, _SPANS, "spans in a group")
        yield meta_event("thread_name", process, _RECEIVED, "KV received")
    for instance, trace in timelines.items():
        for group, stage in sorted({(one.group, one.stage) for one in trace.slices}):
            name = f"scheduler, group {group} stage {stage}"
            yield meta_event("thread_name", instance + 1, _thread(group, stage), name)


def _thread(group: int, stage: int) -> int:
    # Stages are few: a hundred threads for each group keeps them apart.
    return _FIRST_STAGE + 100 * group + stage


def _spans(run: ClusterLogRun, zero: float) -> Iterator[dict[str, Any]]:
    for one in run.spans:
        name = f"{one.request} [{one.start}:{one.end}]"
        for instance in one.group:
            arguments = {"group": list(one.group), "last": one.last}
            yield duration_event(name, "span", instance + 1, _SPANS, one.start_s - zero, one.end_s - zero, arguments)


def _transfers(run: ClusterLogRun, zero: float) -> Iterator[dict[str, Any]]:
    for number, (name, moved) in enumerate(run.transfers):
        # Several at a time: asynchronous events may overlap on one thread.
        common = {"cat": "KV", "id": number, "pid": moved.target + 1, "tid": _RECEIVED}
        common["name"] = f"{name} from {moved.source}"
        yield {**common, "ph": "b", "ts": microseconds(moved.start_s - zero)}
        yield {**common, "ph": "e", "ts": microseconds(moved.end_s - zero)}


def _iterations(instance: int, trace: LiveTimeline, zero: float) -> Iterator[dict[str, Any]]:
    for one in trace.slices:
        kind, thread = "prefill" if one.chunks else "decode", _thread(one.group, one.stage)
        start_s, end_s = one.start_s - zero, one.end_s - zero
        yield duration_event(one.name, kind, instance + 1, thread, start_s, end_s, one.about)


def _requests(run: ClusterLogRun, zero: float) -> Iterator[dict[str, Any]]:
    last_s = max((one.end_s for one in run.spans), default=zero)
    for name, life in run.requests.items():
        common = {"cat": "request", "id": name, "pid": REQUESTS, "tid": 0, "name": name}
        arrival_s = life.request.arrival_s
        arguments = {"prompt": life.request.prompt_tokens}
        yield {**common, "ph": "b", "ts": microseconds(arrival_s - zero), "args": arguments}
        end_s = max(last_s, arrival_s) if life.end_s is None else life.end_s
        error = life.error or ("" if life.end_s is not None else "unfinished")
        yield {**common, "ph": "e", "ts": microseconds(end_s - zero), "args": {"error": error}}
