"""Traces for ui.perfetto.dev, of a simulation, of an engine's event log, and of a cluster's logs.

A process is a replica, a KV group or an instance; a thread is a pipeline stage; a slice is a batch or a span. The first
process has a track for each request, from arrival to end. `TraceEvents` writes the format, the functions below it say
what each source shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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

    def __init__(self, zero_s: float = 0.0) -> None:
        """zero_s: the trace's origin on the clock of the times given."""
        self._zero_s = zero_s
        self.events: list[dict[str, Any]] = []
        self._meta("process_name", _REQUESTS, 0, "requests")

    def to_json(self) -> dict[str, Any]:
        """Return the object that Perfetto and chrome://tracing load."""
        return {"displayTimeUnit": "ms", "traceEvents": self.events}

    def process(self, process: int, name: str) -> None:
        """Name a process."""
        self._meta("process_name", process, 0, name)

    def thread(self, process: int, thread: int, name: str) -> None:
        """Name a thread."""
        self._meta("thread_name", process, thread, name)

    def slice(
        self, at: tuple[int, int], name: str, category: str, start_s: float, end_s: float, about: dict[str, Any]
    ) -> None:
        """Add a slice to a thread. at: (process, thread). about: what a click on the slice shows."""
        where = {"pid": at[0], "tid": at[1], "ts": self._us(start_s), "dur": round((end_s - start_s) * 1e6, 3)}
        self.events.append({"ph": "X", "name": name, "cat": category, **where, "args": about})

    def instant(self, at: tuple[int, int], name: str, at_s: float, about: dict[str, Any]) -> None:
        """Add an instant to a thread."""
        where = {"pid": at[0], "tid": at[1], "ts": self._us(at_s)}
        self.events.append({"ph": "i", "s": "t", "name": name, **where, "args": about})

    def counter(self, process: int, name: str, at_s: float, value: int) -> None:
        """Set a counter of a process."""
        where = {"pid": process, "tid": 0, "ts": self._us(at_s)}
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
            event = {**common, "ph": phase, "ts": self._us(at_s)}
            self.events.append(event if shown is None else {**event, "args": dict(shown)})

        add("b", start_s, about)
        if mark is not None:
            add("n", mark[1], {"what": mark[0]})
        add("e", end_s, end)

    def _meta(self, kind: str, process: int, thread: int, name: str) -> None:
        self.events.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}})

    def _us(self, at_s: float) -> float:
        return round((at_s - self._zero_s) * 1e6, 3)


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


@dataclass(frozen=True)
class StageSlice:
    """The part of one batch that one stage of one KV group computed: seconds on the log's clock."""

    batch: int
    group: int
    stage: int
    start_s: float
    end_s: float
    decodes: int
    chunks: tuple[tuple[str, int, int], ...]
    """(request, first token, tokens) of each chunk."""
    predicted_s: float
    assisted: int = 0
    """Rows of other groups' requests whose attention over this group's KV it computed."""

    @property
    def name(self) -> str:
        words = f"{self.decodes} decodes"
        prefill = sum(tokens for _, _, tokens in self.chunks)
        own = f"{prefill} prefill + {words}" if self.chunks else words
        return f"{own} + {self.assisted} assisted" if self.assisted else own

    def add_to(self, trace: TraceEvents, at: tuple[int, int]) -> None:
        about = {"batch": self.batch, "chunks": _chunks_text(self.chunks), "predicted_ms": self.predicted_s * 1e3}
        trace.slice(at, self.name, "prefill" if self.chunks else "decode", self.start_s, self.end_s, about)


@dataclass
class _RequestLife:
    arrival_s: float
    prompt: int
    first_chunk_s: float | None = None
    end_s: float | None = None
    error: str = ""


@dataclass(frozen=True)
class GroupJoined:
    """A KV group joined a request: it holds the request's KV from token `start` on."""

    group: int
    request: str
    start: int
    at_s: float


@dataclass
class EngineTimeline:
    """What an engine's event log says of its stages and requests."""

    slices: list[StageSlice] = field(default_factory=list)
    requests: dict[str, _RequestLife] = field(default_factory=dict)
    joins: list[GroupJoined] = field(default_factory=list)

    @property
    def lanes(self) -> list[tuple[int, int]]:
        """(group, stage) of all slices, ascending."""
        return sorted({(one.group, one.stage) for one in self.slices})


def engine_timeline(events: Iterable[Mapping[str, Any]]) -> EngineTimeline:
    """Read the events of `headway serve --event-log FILE` or of the vLLM plug-in.

    Raises ConfigError on a log of an older version, without times by stage."""
    found = EngineTimeline()
    for event in events:
        kind = event.get("event")
        if kind == "add":
            found.requests[event["request"]] = _RequestLife(event["arrival_s"], event["prompt"])
        elif (kind == "abort" or event.get("aborted")) and event["request"] in found.requests:
            life = found.requests[event["request"]]
            life.end_s, life.error = event["at_s"], "aborted"
        elif kind == "batch":
            if "parts" not in event:
                raise ConfigError("the log's batches do not say when each stage computed: it is of an older version")
            _add_batch(found, event)
    return found


def _add_batch(found: EngineTimeline, event: Mapping[str, Any]) -> None:
    assisted: dict[int, int] = {}
    for group, _, rows, _ in event.get("assists", ()):
        assisted[group] = assisted.get(group, 0) + rows
    # a group joins at the start of the batch with its first tokens
    begun = {group: stages[0][0] for group, _, _, stages in event["parts"] if stages}
    for group, request, start in event.get("joins", ()):
        found.joins.append(GroupJoined(group, request, start, begun.get(group, event["at_s"])))
    for group, decodes, chunks, stages in event["parts"]:
        held = tuple((name, start, tokens) for name, start, tokens in chunks)
        rest = (decodes, held, event["predicted_s"], assisted.get(group, 0))
        for stage, (start_s, end_s) in enumerate(stages):
            found.slices.append(StageSlice(event["id"], group, stage, start_s, end_s, *rest))
        for name, _, _ in held:
            life = found.requests.get(name)
            if life is not None and life.first_chunk_s is None and stages:
                life.first_chunk_s = stages[0][0]
    for name in event["ended"]:
        if name in found.requests:
            found.requests[name].end_s = event["at_s"]


def engine_trace(found: EngineTimeline) -> dict[str, Any]:
    """Return the trace of an engine's log: a process for each KV group, a thread for each pipeline stage."""
    times = [one.start_s for one in found.slices] + [life.arrival_s for life in found.requests.values()]
    trace = TraceEvents(min(times, default=0.0))
    for group, stage in found.lanes:
        trace.process(group + 1, f"group {group}")
        trace.thread(group + 1, stage + 1, f"stage {stage}")
    for one in found.slices:
        one.add_to(trace, (one.group + 1, one.stage + 1))
    for join in found.joins:
        words = f"group {join.group} joins {join.request}"
        trace.instant((join.group + 1, 1), words, join.at_s, {"from_token": join.start})
    last_s = max((one.end_s for one in found.slices), default=min(times, default=0.0))
    for name, life in found.requests.items():
        mark = None if life.first_chunk_s is None else ("first chunk", life.first_chunk_s)
        end_s = last_s if life.end_s is None else life.end_s
        trace.interval(
            _request(name, name), life.arrival_s, end_s, {"prompt": life.prompt}, mark, {"error": life.error}
        )
    return trace.to_json()


def cluster_trace(run: ClusterLogRun) -> dict[str, Any]:
    """Return the trace of a cluster's logs: a process for each instance, with threads for the spans that it computed in
    groups, the KV that it received, and its scheduler's iterations by KV group and stage.

    Raises ConfigError on a log of an older version, without times by stage."""
    timelines = {instance: engine_timeline(events) for instance, events in run.batches.items()}
    starts = [life.request.arrival_s for life in run.requests.values()] + [one.start_s for one in run.spans]
    starts += [one.start_s for each in timelines.values() for one in each.slices]
    zero_s = min(starts, default=0.0)
    trace = TraceEvents(zero_s)

    def lane(group: int, stage: int) -> int:
        # Stages are few: a hundred threads for each group keeps them apart.
        return _FIRST_STAGE + 100 * group + stage

    for one in run.instances:
        trace.process(one.id + 1, f"instance {one.id} ({one.role}, node {one.node})")
        trace.thread(one.id + 1, _SPANS, "spans in a group")
        trace.thread(one.id + 1, _RECEIVED, "KV received")
    for instance, found in timelines.items():
        for group, stage in found.lanes:
            trace.thread(instance + 1, lane(group, stage), f"scheduler, group {group} stage {stage}")
    for span in run.spans:
        about = {"group": list(span.group), "last": span.last}
        for instance in span.group:
            at, name = (instance + 1, _SPANS), f"{span.request} [{span.start}:{span.end}]"
            trace.slice(at, name, "span", span.start_s, span.end_s, about)
    for number, (name, moved) in enumerate(run.transfers):
        common = {"cat": "KV", "id": number, "pid": moved.target + 1, "tid": _RECEIVED}
        trace.interval({**common, "name": f"{name} from {moved.source}"}, moved.start_s, moved.end_s)
    last_s = max((span.end_s for span in run.spans), default=zero_s)
    for name, life in run.requests.items():
        arrival_s = life.request.arrival_s
        end_s = max(last_s, arrival_s) if life.end_s is None else life.end_s
        error = life.error or ("" if life.end_s is not None else "unfinished")
        about = {"prompt": life.request.prompt_tokens}
        trace.interval(_request(name, name), arrival_s, end_s, about, None, {"error": error})
    for instance, found in timelines.items():
        for one_slice in found.slices:
            one_slice.add_to(trace, (instance + 1, lane(one_slice.group, one_slice.stage)))
    return trace.to_json()
