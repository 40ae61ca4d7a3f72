"""What a cluster did, from its logs: that of its router (`headway cluster --event-log FILE`) and, beside it, those of
its instances' schedulers (FILE.0, FILE.1, …; after a restart FILE.0.1). Times are seconds of the router's clock; those
of instances on other hosts are as their own clocks had them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.control.log import SCHEMA
from headway.control.log import read_log as read_decisions
from headway.core.errors import ConfigError, reading
from headway.core.files import read_lines
from headway.core.request import Request
from headway.policy.placement.contract import ClusterInstance
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


def open_log(path: Path) -> ClusterLogRun | Iterator[Mapping[str, Any]]:
    """Return the run of a router's log, or the events of an engine's. Raises ConfigError for a file that is neither."""
    return read_cluster(path) if is_cluster_log(path) else read_log(path)


def engine_log(path: Path) -> Iterator[Mapping[str, Any]]:
    """Return the events of an engine's log. Raises ConfigError for a router's, which has no batches."""
    if is_cluster_log(path):
        raise ConfigError(
            f"{path} is the log of a cluster's router; those of its instances' schedulers are {path}.0, {path}.1 and "
            "so on"
        )
    return read_log(path)


def is_cluster_log(path: Path) -> bool:
    """Whether a file begins as a router's log does, of whatever version. Raises ConfigError for an unreadable file."""
    try:
        first = msgspec.json.decode(next(read_lines(path), b""), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return str(first.get("schema", "")).startswith(SCHEMA.rpartition("/")[0])


def read_cluster(path: Path) -> ClusterLogRun:
    """Read a router's log and those of its instances beside it. Raises ConfigError."""
    run = ClusterLogRun()
    try:
        lines = read_decisions(read_lines(path))[1]
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', error)}") from error
    for number, line in lines:
        with reading(f"{path}: line {number} is not that of a cluster's log"):
            _take(run, line)
    own = re.compile(re.escape(path.name) + r"\.(\d+)(\.\d+)*")
    for file in sorted(path.parent.glob(f"{path.name}.*")):
        match = own.fullmatch(file.name)
        if match is not None:
            run.batches.setdefault(int(match[1]), []).extend(read_log(file))
    return run


def _take(run: ClusterLogRun, line: Mapping[str, Any]) -> None:
    if "instance" in line:
        # others of an instance's lines change its load
        if line["instance"]["id"] == len(run.instances):
            run.instances.append(msgspec.convert(line["instance"], ClusterInstance))
    elif "span" in line:
        tokens, times = (line["start"], line["end"]), (line["began_s"], line["t"])
        run.spans.append(GroupSpan(line["span"], tuple(line["group"]), *tokens, *times, line["last"]))
    elif "sent" in line:
        moved = KvTransfer(line["source"], line["target"], line["began_s"], line["t"])
        run.transfers.append((line["sent"], moved))
    elif "event" in line:
        kind, fields = line["event"]
        if kind == "RequestArrived":
            request = msgspec.convert(fields["request"], Request)
            run.requests[request.id] = ClusterRequestLife(request)
        elif kind in ("RequestFinished", "RequestDropped"):
            life = run.requests[fields["request"]]
            life.end_s, life.error = line["t"], fields.get("why")
