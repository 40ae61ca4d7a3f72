"""`headway trace EVENTLOG --out FILE`: convert an engine's event log to a trace for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

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

    from headway.sim.replay import ClusterLogRun, open_log
    from headway.sim.report.perfetto import cluster_trace, engine_timeline, engine_trace

    log = open_log(arguments.log)
    with reading(f"{arguments.log} is damaged", ConfigError):
        if isinstance(log, ClusterLogRun):
            body = msgspec.json.encode(cluster_trace(log))
            counts = f"{len(log.spans)} spans, {len(log.transfers)} KV transfers, {len(log.requests)} requests"
            drawn = f"{len(log.instances)} instances, {counts}"
        else:
            trace = engine_timeline(log)
            body = msgspec.json.encode(engine_trace(trace))
            drawn = f"{len(trace.slices)} slices on {len(trace.lanes)} lanes, {len(trace.requests)} requests"
            if not trace.slices and not trace.requests:
                raise ConfigError(f"{arguments.log} has no request and no batch: there is nothing to draw")
    write_output(arguments.out, body)
    # Where the trace goes to stdout, it is alone there.
    print(f"{drawn}: {arguments.out}", file=sys.stderr if str(arguments.out) == "-" else sys.stdout)
    return 0
