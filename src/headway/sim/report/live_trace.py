"""Trace events of a live run, for ui.perfetto.dev: a process for each KV group, a thread for each pipeline stage, a
slice for each batch, and an instant where a KV group joins a request.

Read from an event log (of `headway serve --event-log FILE` or the vLLM plug-in). A track of requests (arrival to end,
with their first chunk) comes first. Times are microseconds from the log's start, as the format requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.core.errors import ConfigError

REQUESTS = 0

Interval = tuple[float, float]


@dataclass(frozen=True)
class StageSlice:
    """One part of one batch on one stage: seconds on the log's clock."""

    batch: int
    group: int
    stage: int
    start_s: float
    end_s: float
    decodes: int
    chunks: tuple[tuple[str, int, int], ...]
    predicted_s: float
    assisted: int = 0
    """Rows of other groups' requests whose attention over this group's KV it computed."""

    @property
    def name(self) -> str:
        words = f"{self.decodes} decodes"
        prefill = sum(tokens for _, _, tokens in self.chunks)
        own = f"{prefill} prefill + {words}" if self.chunks else words
        return f"{own} + {self.assisted} assisted" if self.assisted else own

    @property
    def about(self) -> dict[str, Any]:
        """What a click on it shows."""
        chunks = ", ".join(f"{name}[{start}:{start + tokens}]" for name, start, tokens in self.chunks)
        return {"batch": self.batch, "chunks": chunks, "predicted_ms": self.predicted_s * 1e3}


@dataclass
class _RequestSpan:
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
class LiveTimeline:
    """The slices of all stages, and the lives of requests, as read from a log."""

    slices: list[StageSlice] = field(default_factory=list)
    requests: dict[str, _RequestSpan] = field(default_factory=dict)
    joins: list[GroupJoined] = field(default_factory=list)

    def both_share(self, request: str, group: int = 0) -> float:
        """Return how much the chunks of a request overlap in a group's pipeline: the share of time in which all stages
        computed, from the request's first chunk to its last. 0.0 without chunks."""
        chosen = [one for one in self.slices if one.group == group]
        own = [one for one in chosen if any(name == request for name, _, _ in one.chunks)]
        if not own:
            return 0.0
        begin, end = min(one.start_s for one in own), max(one.end_s for one in own)
        stages = sorted({one.stage for one in chosen})
        # intersect the busy intervals of all stages, whatever they computed
        common: list[Interval] = [(begin, end)]
        for stage in stages:
            busy = [(one.start_s, one.end_s) for one in chosen if one.stage == stage]
            common = _meet(common, sorted(busy))
        return sum(stop - start for start, stop in common) / (end - begin)


def timeline(events: Iterable[Mapping[str, Any]]) -> LiveTimeline:
    """Return the timeline of a log. Raises ConfigError on a log of an older version, without times by stage."""
    trace = LiveTimeline()
    for event in events:
        kind = event.get("event")
        if kind == "add":
            trace.requests[event["request"]] = _RequestSpan(event["arrival_s"], event["prompt"])
        elif (kind == "abort" or event.get("aborted")) and event["request"] in trace.requests:
            life = trace.requests[event["request"]]
            life.end_s, life.error = event["at_s"], "aborted"
        elif kind == "batch":
            if "parts" not in event:
                raise ConfigError("the log's batches do not say when each stage computed: it is of an older version")
            _add(trace, event)
    return trace


def live_trace_events(trace: LiveTimeline) -> dict[str, Any]:
    """Return the JSON object that Perfetto and chrome://tracing load."""
    times = [one.start_s for one in trace.slices] + [life.arrival_s for life in trace.requests.values()]
    zero = min(times, default=0.0)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [*_names(trace), *_batches(trace, zero), *_joins(trace, zero), *_requests(trace, zero)],
    }


def _add(trace: LiveTimeline, event: Mapping[str, Any]) -> None:
    assisted: dict[int, int] = {}
    for group, _, rows, _ in event.get("assists", ()):
        assisted[group] = assisted.get(group, 0) + rows
    # a group joins at the start of the batch with its first tokens
    begun = {group: stages[0][0] for group, _, _, stages in event["parts"] if stages}
    for group, request, start in event.get("joins", ()):
        trace.joins.append(GroupJoined(group, request, start, begun.get(group, event["at_s"])))
    for group, decodes, chunks, stages in event["parts"]:
        held = tuple((name, start, tokens) for name, start, tokens in chunks)
        for stage, (start_s, end_s) in enumerate(stages):
            trace.slices.append(
                StageSlice(
                    event["id"],
                    group,
                    stage,
                    start_s,
                    end_s,
                    decodes,
                    held,
                    event["predicted_s"],
                    assisted.get(group, 0),
                )
            )
        for name, _, _ in held:
            life = trace.requests.get(name)
            if life is not None and life.first_chunk_s is None and stages:
                life.first_chunk_s = stages[0][0]
    for name in event["ended"]:
        if name in trace.requests:
            trace.requests[name].end_s = event["at_s"]


def _meet(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Return the intersection of two lists of disjoint, ascending intervals."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            result.append((start, end))
        # the interval that ends first cannot meet any later one
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return result


def _names(trace: LiveTimeline) -> Iterator[dict[str, Any]]:
    yield meta_event("process_name", REQUESTS, 0, "requests")
    for group, stage in sorted({(one.group, one.stage) for one in trace.slices}):
        yield meta_event("process_name", group + 1, 0, f"group {group}")
        yield meta_event("thread_name", group + 1, stage + 1, f"stage {stage}")


def meta_event(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """Return the event that names a process or a thread."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _batches(trace: LiveTimeline, zero: float) -> Iterator[dict[str, Any]]:
    for one in trace.slices:
        kind, start_s, end_s = "prefill" if one.chunks else "decode", one.start_s - zero, one.end_s - zero
        yield duration_event(one.name, kind, one.group + 1, one.stage + 1, start_s, end_s, one.about)


def _joins(trace: LiveTimeline, zero: float) -> Iterator[dict[str, Any]]:
    for join in trace.joins:
        yield {
            "ph": "i",
            "s": "t",
            "name": f"group {join.group} joins {join.request}",
            "pid": join.group + 1,
            "tid": 1,
            "ts": microseconds(join.at_s - zero),
            "args": {"from_token": join.start},
        }


def _requests(trace: LiveTimeline, zero: float) -> Iterator[dict[str, Any]]:
    last = max((one.end_s for one in trace.slices), default=zero)
    for name, life in trace.requests.items():
        common = {"cat": "request", "id": name, "pid": REQUESTS, "tid": 0, "name": name}
        yield {**common, "ph": "b", "ts": microseconds(life.arrival_s - zero), "args": {"prompt": life.prompt}}
        if life.first_chunk_s is not None:
            args = {"what": "first chunk"}
            yield {**common, "ph": "n", "ts": microseconds(life.first_chunk_s - zero), "args": args}
        end_s = last if life.end_s is None else life.end_s
        yield {**common, "ph": "e", "ts": microseconds(end_s - zero), "args": {"error": life.error}}


def duration_event(
    name: str, category: str, process: int, thread: int, start_s: float, end_s: float, about: dict[str, Any]
) -> dict[str, Any]:
    """Return a slice of a thread. about: what a click on it shows."""
    where = {"pid": process, "tid": thread, "ts": microseconds(start_s), "dur": microseconds(end_s - start_s)}
    return {"ph": "X", "name": name, "cat": category, **where, "args": about}


def microseconds(seconds: float) -> float:
    """Return a time as the format has it."""
    return round(seconds * 1e6, 3)
