"""Traces for ui.perfetto.dev, of a simulation, of an engine's event log, and of a cluster's logs.

A process is a replica, a KV group or an instance; a thread is a pipeline stage; a slice is a batch or a span. The first
process has a track for each request, from arrival to end. `TraceEvents` writes the format, the functions below it say
what each source shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.errors import ConfigError
from headway.sim.replay import ClusterLogRun
from headway.sim.result import SimResult

_REQUESTS = 0
"""Process with the tracks of requests."""
_SPANS, _RECEIVED, _FIRST_STAGE = 1, 2, 3
"""Threads of a cluster's instance."""


class TraceEvents:
    """Trace events in the JSON format of chrome://tracing. Methods take seconds; events have microseconds."""

    def __init__(self, zero_s: float | None = 0.0) -> None:
        """zero_s: the trace's origin on the clock of the times given; None: the earliest of these."""
        self._zero_s = zero_s
        self._named: set[tuple[str, int, int]] = set()
        # `ts` in seconds until `to_json`
        self.events: list[dict[str, Any]] = []
        self.process(_REQUESTS, "requests")

    def to_json(self) -> dict[str, Any]:
        """Return the object that Perfetto and chrome://tracing load."""
        zero_s = self._zero_s
        if zero_s is None:
            zero_s = min((event["ts"] for event in self.events if "ts" in event), default=0.0)
        events = [
            {**event, "ts": round((event["ts"] - zero_s) * 1e6, 3)} if "ts" in event else event for event in self.events
        ]
        return {"displayTimeUnit": "ms", "traceEvents": events}

    def described(self) -> str:
        """Return what is drawn, in words."""
        slices = [(event["pid"], event["tid"]) for event in self.events if event["ph"] == "X"]
        requests = sum(event["ph"] == "b" and event["pid"] == _REQUESTS for event in self.events)
        return f"{len(slices)} slices on {len(set(slices))} lanes, {requests} requests"

    def process(self, process: int, name: str) -> None:
        """Name a process; the first name counts."""
        self._meta("process_name", process, 0, name)

    def thread(self, process: int, thread: int, name: str) -> None:
        """Name a thread; the first name counts."""
        self._meta("thread_name", process, thread, name)

    def slice(
        self, at: tuple[int, int], name: str, category: str, start_s: float, end_s: float, about: dict[str, Any]
    ) -> None:
        """Add a slice to a thread. at: (process, thread). about: what a click on the slice shows."""
        where = {"pid": at[0], "tid": at[1], "ts": start_s, "dur": round((end_s - start_s) * 1e6, 3)}
        self.events.append({"ph": "X", "name": name, "cat": category, **where, "args": about})

    def instant(self, at: tuple[int, int], name: str, at_s: float, about: dict[str, Any]) -> None:
        """Add an instant to a thread."""
        where = {"pid": at[0], "tid": at[1], "ts": at_s}
        self.events.append({"ph": "i", "s": "t", "name": name, **where, "args": about})

    def counter(self, process: int, name: str, at_s: float, value: int) -> None:
        """Set a counter of a process."""
        where = {"pid": process, "tid": 0, "ts": at_s}
        self.events.append({"ph": "C", "name": name, **where, "args": {name: value}})

    def interval(
        self,
        common: dict[str, Any],
        start_s: float,
        end_s: float,
        about: Mapping[str, Any] | None = None,
        mark: tuple[str, float] | None = None,
        end: Mapping[str, Any] | None = None,
    ) -> None:
        """Add an interval that may overlap others of its thread.

        common: category, id, process, thread and name. mark: words and time of an instant inside it. about and end:
        what clicks on its begin and end show."""

        def add(phase: str, at_s: float, shown: Mapping[str, Any] | None) -> None:
            event = {**common, "ph": phase, "ts": at_s}
            self.events.append(event if shown is None else {**event, "args": dict(shown)})

        add("b", start_s, about)
        if mark is not None:
            add("n", mark[1], {"what": mark[0]})
        add("e", end_s, end)

    def _meta(self, kind: str, process: int, thread: int, name: str) -> None:
        if (kind, process, thread) not in self._named:
            self._named.add((kind, process, thread))
            self.events.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}})


def _request(name: str, key: str, category: str = "request") -> dict[str, Any]:
    return {"cat": category, "id": key, "pid": _REQUESTS, "tid": 0, "name": name}


def _chunks_text(chunks: Iterable[tuple[str, int, int]]) -> str:
    return ", ".join(f"{name}[{start}:{start + tokens}]" for name, start, tokens in chunks)


def simulation_trace(result: SimResult) -> dict[str, Any]:
    """Return the trace of a simulation whose iterations were kept."""
    trace = TraceEvents()

    def lane(group: int, stage: int) -> int:
        return group * result.stages + stage + 1

    for replica in range(len(result.replicas)):
        trace.process(replica + 1, f"replica {replica}")
        for group, stage in itertools.product(range(result.groups), range(result.stages)):
            name = f"group {group} stage {stage}" if result.groups > 1 else f"stage {stage}"
            trace.thread(replica + 1, lane(group, stage), name)
    for row in result.iterations:
        words = f"{row.decodes} decodes" + (f" ×{row.repeats}" if row.repeats > 1 else "")
        name = f"{sum(tokens for _, _, tokens in row.chunks)} prefill + {words}" if row.chunks else words
        about = {
            "batch": row.batch,
            "chunks": _chunks_text(row.chunks),
            "kv": row.decode_kv,
            "predicted_ms": row.predicted_s * 1e3,
        }
        for group, (stage, (start_s, end_s)) in itertools.product(row.groups, enumerate(row.stages)):
            # repeated decodes are one slice up to the last repetition
            until_s = row.done_s if row.repeats > 1 else end_s
            at = (row.replica + 1, lane(group, stage))
            trace.slice(at, name, "prefill" if row.chunks else "decode", start_s, until_s, about)
        trace.counter(row.replica + 1, "decodes", row.stages[0][0], row.decodes)
    for join in (join for use in result.replicas for join in use.joins):
        at = (join.replica + 1, lane(join.group, 0))
        about = {"from_token": join.start, "groups": join.groups}
        trace.instant(at, f"group {join.group} joins {join.request}", join.at_s, about)
    for record in result.records:
        # failed requests end with their last token, rejected ones on arrival
        ends = (record.finish_s, record.token_s[-1] if record.token_s else None, record.arrival_s)
        end_s = next(end for end in ends if end is not None)
        trace.interval(
            _request(f"{record.klass or 'request'} {record.id}", record.id, record.klass or "request"),
            record.arrival_s,
            end_s,
            {"prompt": record.prompt_tokens, "output": record.output_tokens, "error": record.error or ""},
            ("first token", record.token_s[0]) if record.token_s else None,
        )
    return trace.to_json()


Lane = Callable[[int, int], tuple[int, int]]
"""The process and the thread of a (KV group, pipeline stage), which it names."""


@dataclass
class _RequestLife:
    arrival_s: float
    prompt: int
    first_chunk_s: float | None = None
    end_s: float | None = None
    error: str = ""


def engine_trace(events: Iterable[Mapping[str, Any]]) -> TraceEvents:
    """Return the trace of `headway serve --event-log FILE` or of the vLLM plug-in: a process for each KV group, a
    thread for each pipeline stage.

    Raises ConfigError on a log of an older version, without times by stage."""
    trace = TraceEvents(None)

    def lane(group: int, stage: int) -> tuple[int, int]:
        trace.process(group + 1, f"group {group}")
        trace.thread(group + 1, stage + 1, f"stage {stage}")
        return group + 1, stage + 1

    requests, last_s = _add_engine_log(trace, events, lane)
    for name, life in requests.items():
        mark = None if life.first_chunk_s is None else ("first chunk", life.first_chunk_s)
        end_s = max(last_s, life.arrival_s) if life.end_s is None else life.end_s
        error = {"error": life.error or ("unfinished" if life.end_s is None else "")}
        trace.interval(_request(name, name), life.arrival_s, end_s, {"prompt": life.prompt}, mark, error)
    return trace


def _add_engine_log(
    trace: TraceEvents, events: Iterable[Mapping[str, Any]], lane: Lane
) -> tuple[dict[str, _RequestLife], float]:
    """Add an engine's batches and the KV groups that join requests; return its requests, and its last batch's end."""
    requests: dict[str, _RequestLife] = {}
    last_s = float("-inf")
    for event in events:
        kind = event.get("event")
        if kind == "add":
            requests[event["request"]] = _RequestLife(event["arrival_s"], event["prompt"])
        elif (kind == "abort" or event.get("aborted")) and event["request"] in requests:
            life = requests[event["request"]]
            life.end_s, life.error = event["at_s"], "aborted"
        elif kind == "batch":
            if "parts" not in event:
                raise ConfigError("the log's batches do not say when each stage computed: it is of an older version")
            last_s = max(last_s, _add_batch(trace, event, lane, requests))
    return requests, last_s


def _add_batch(trace: TraceEvents, event: Mapping[str, Any], lane: Lane, requests: dict[str, _RequestLife]) -> float:
    """Add a batch; return the end of its last stage."""
    # rows of other groups' requests whose attention over a group's KV it computed
    assisted: dict[int, int] = {}
    for group, _, rows, _ in event.get("assists", ()):
        assisted[group] = assisted.get(group, 0) + rows
    last_s = float("-inf")
    for group, decodes, chunks, stages in event["parts"]:
        words = f"{decodes} decodes" + (f" + {assisted[group]} assisted" if group in assisted else "")
        name = f"{sum(tokens for _, _, tokens in chunks)} prefill + {words}" if chunks else words
        about = {"batch": event["id"], "chunks": _chunks_text(chunks), "predicted_ms": event["predicted_s"] * 1e3}
        for stage, (start_s, end_s) in enumerate(stages):
            trace.slice(lane(group, stage), name, "prefill" if chunks else "decode", start_s, end_s, about)
            last_s = max(last_s, end_s)
        for request, _, _ in chunks:
            life = requests.get(request)
            if life is not None and life.first_chunk_s is None and stages:
                life.first_chunk_s = stages[0][0]
    # a group joins at the start of the batch with its first tokens
    begun = {group: stages[0][0] for group, _, _, stages in event["parts"] if stages}
    for group, request, start in event.get("joins", ()):
        at_s = begun.get(group, event["at_s"])
        trace.instant(lane(group, 0), f"group {group} joins {request}", at_s, {"from_token": start})
    for name in event["ended"]:
        if name in requests:
            requests[name].end_s = event["at_s"]
    return last_s


def cluster_trace(run: ClusterLogRun) -> TraceEvents:
    """Return the trace of a cluster's logs: a process for each instance, with threads for the spans that it computed in
    groups, the KV that it received, and its scheduler's iterations by KV group and stage.

    Raises ConfigError on a log of an older version, without times by stage."""
    trace = TraceEvents(None)
    for one in run.instances:
        trace.process(one.id + 1, f"instance {one.id} ({one.role}, node {one.node})")
        trace.thread(one.id + 1, _SPANS, "spans in a group")
        trace.thread(one.id + 1, _RECEIVED, "KV received")
    for span in run.spans:
        about = {"group": list(span.group), "last": span.last}
        for instance in span.group:
            at, name = (instance + 1, _SPANS), f"{span.request} [{span.start}:{span.end}]"
            trace.slice(at, name, "span", span.start_s, span.end_s, about)
    for number, (name, moved) in enumerate(run.transfers):
        common = {"cat": "KV", "id": number, "pid": moved.target + 1, "tid": _RECEIVED}
        trace.interval({**common, "name": f"{name} from {moved.source}"}, moved.start_s, moved.end_s)
    last_s = max((span.end_s for span in run.spans), default=float("-inf"))
    for name, life in run.requests.items():
        arrival_s = life.request.arrival_s
        end_s = max(last_s, arrival_s) if life.end_s is None else life.end_s
        error = life.error or ("" if life.end_s is not None else "unfinished")
        about = {"prompt": life.request.prompt_tokens}
        trace.interval(_request(name, name), arrival_s, end_s, about, None, {"error": error})
    for instance, events in run.batches.items():

        def lane(group: int, stage: int, process: int = instance + 1) -> tuple[int, int]:
            # Stages are few: a hundred threads for each group keeps them apart.
            thread = _FIRST_STAGE + 100 * group + stage
            trace.thread(process, thread, f"scheduler, group {group} stage {stage}")
            return process, thread

        _add_engine_log(trace, events, lane)
    return trace
