"""What a cluster did, from its logs: that of its router (`headway cluster --event-log FILE`) and, beside it, those of
its instances' schedulers (FILE.0, FILE.1, …; after a restart FILE.0.1). Times are seconds of the router's clock; those
of instances on other hosts are as their own clocks had them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.control.log_reader import SCHEMAS
from headway.control.queue_entries import SpanEntry
from headway.control.recorded_policy import RecordedPolicy
from headway.control.replay import ReplayResult
from headway.control.transfer_queue import KvSlice
from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.perf.latency.eq1 import PrefillSample
from headway.policy.placement.view import ClusterInstance
from headway.sim.explanation import KvTransfer
from headway.sim.replay import read_log


@dataclass(frozen=True)
class GroupSpan:
    """A part of a prompt that a group of instances computed, from its begin or resumption to its end or pause."""

    request: str
    group: tuple[int, ...]
    start: int
    end: int
    start_s: float
    end_s: float
    last: bool
    """Whether the prompt ends with it."""


@dataclass
class ClusterRequestLife:
    """One attempt at a request, under the id that the router gave it."""

    request: Request
    end_s: float | None = None
    error: str | None = None


@dataclass
class ClusterLogRun:
    """A run of a cluster."""

    instances: list[ClusterInstance] = field(default_factory=list)
    requests: dict[str, ClusterRequestLife] = field(default_factory=dict)
    spans: list[GroupSpan] = field(default_factory=list)
    transfers: list[tuple[str, KvTransfer]] = field(default_factory=list)
    """(request, slice)."""
    batches: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Events of each instance's own log, in order: those of all its processes."""


def is_cluster_log(path: Path) -> bool:
    """Whether a file begins as a router's log does. Raises ConfigError for one that cannot be read."""
    try:
        with path.open("rb") as file:
            first = msgspec.json.decode(file.readline(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return first.get("schema") in SCHEMAS


def read_cluster(path: Path) -> ClusterLogRun:
    """Read a router's log and those of its instances beside it. Raises ConfigError."""
    watcher = _ReplayObserver()
    run = watcher.run
    try:
        replay = ReplayResult(path.read_bytes().splitlines(keepends=True), RecordedPolicy, observer=watcher)
        run.instances = list(replay.controller.state.cluster.instances)
        difference = replay.run()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: its first line is not that of a cluster's log: {error}") from None
    if difference is not None:
        raise ConfigError(f"{path}: this version's router does otherwise than the recorded one: {difference}")
    own = re.compile(re.escape(path.name) + r"\.(\d+)(\.\d+)*")
    for file in sorted(path.parent.glob(f"{path.name}.*")):
        match = own.fullmatch(file.name)
        if match is not None:
            run.batches.setdefault(int(match[1]), []).extend(read_log(file))
    return run


class _ReplayObserver:
    """Notes what happens in a replay."""

    def __init__(self) -> None:
        self.run = ClusterLogRun()
        # By entry under way: when it began.
        self._begun: dict[int, float] = {}

    def span_begun(self, entry: SpanEntry, now: float) -> None:
        self._begun[id(entry)] = now

    def span_ended(self, entry: SpanEntry, now: float) -> None:
        start_s = self._begun.pop(id(entry), None)
        if start_s is None:
            return
        for one in (entry, *entry.batched_with):
            self.run.spans.append(GroupSpan(one.owner, one.group, one.span.start, one.span.end, start_s, now, one.last))

    def kv_sent(self, kv_slice: KvSlice, now: float) -> None:
        moved = KvTransfer(kv_slice.source, kv_slice.target, kv_slice.began_s, now)
        self.run.transfers.append((kv_slice.request, moved))

    def called(self, call: dict[str, Any], now: float) -> None:
        if call["do"] == "arrive":
            request = msgspec.convert(call["request"], Request)
            self.run.requests[request.id] = ClusterRequestLife(request)
        life = self.run.requests.get(call.get("request", "")) if isinstance(call.get("request"), str) else None
        if life is None:
            return
        if call["do"] == "drop":
            life.end_s, life.error = now, call["why"]
        elif call["do"] == "left_scheduler" and call["finished"]:
            life.end_s = now


def prefill_samples(run: ClusterLogRun) -> list[PrefillSample]:
    """Return what spans took on their groups: of those that ran whole and alone, neither paused nor stopped."""
    alone = Counter((span.request, span.start) for span in run.spans)
    batches = Counter((span.group, span.start_s) for span in run.spans)
    return [
        PrefillSample(len(span.group), span.start, span.end - span.start, span.end_s - span.start_s)
        for span in run.spans
        if alone[span.request, span.start] == 1
        and batches[span.group, span.start_s] == 1
        and (life := run.requests.get(span.request)) is not None
        and life.error is None
        and span.end_s > span.start_s
    ]


def merged_batches(run: ClusterLogRun) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Yield (instance, batch event) of all instances by the batch's end."""
    batches = [
        (instance, event) for instance, events in run.batches.items() for event in events if event["event"] == "batch"
    ]
    return sorted(batches, key=lambda one: one[1]["at_s"])
