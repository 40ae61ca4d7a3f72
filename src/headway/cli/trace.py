"""`headway trace EVENTLOG --out FILE`: convert an engine's event log to a trace for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError, reading
from headway.core.files import write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log",
        type=Path,
        help="event log of `headway serve` or `cluster` (--event-log), or of the vLLM plug-in",
    )
    parser.add_argument("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="default: trace.json")


def run(arguments: argparse.Namespace) -> int:
    import msgspec

    from headway.sim.cluster_log import is_cluster_log, read_cluster
    from headway.sim.replay import read_log
    from headway.sim.report.perfetto import cluster_trace, engine_timeline, engine_trace

    if is_cluster_log(arguments.log):
        run = read_cluster(arguments.log)
        with reading(f"{arguments.log} is damaged", ConfigError):
            body = msgspec.json.encode(cluster_trace(run))
        write_output(arguments.out, body)
        counts = f"{len(run.spans)} spans, {len(run.transfers)} KV transfers, {len(run.requests)} requests"
        _say(f"{len(run.instances)} instances, {counts}: {arguments.out}", arguments.out)
        return 0
    with reading(f"{arguments.log} is damaged", ConfigError):
        trace = engine_timeline(of_an_engine(read_log(arguments.log), arguments.log))
        body = msgspec.json.encode(engine_trace(trace))
    if not trace.slices and not trace.requests:
        raise ConfigError(f"{arguments.log} says of no request and no batch: there is nothing to draw")
    write_output(arguments.out, body)
    lanes = len(trace.lanes)
    _say(f"{len(trace.slices)} slices on {lanes} lanes, {len(trace.requests)} requests: {arguments.out}", arguments.out)
    return 0


def _say(words: str, out: Path) -> None:
    # Where the trace goes to stdout, it is alone there.
    print(words, file=sys.stderr if str(out) == "-" else sys.stdout)


def of_an_engine(events: Iterable[Mapping[str, Any]], path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the events of an engine's log. Raises ConfigError for a router's log, which has no batches."""
    from headway.sim.cluster_log import names_cluster_log

    for event in events:
        # Only the first line of a controller's log has its schema.
        if names_cluster_log(event):
            raise ConfigError(
                f"{path} is the log of a cluster's router; those of its instances' schedulers are {path}.0, {path}.1 "
                "and so on"
            )
        yield event
