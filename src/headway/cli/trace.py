"""`headway trace EVENTLOG --out FILE`: convert an engine's event log to a trace for ui.perfetto.dev."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.output_file import write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, help="an event log of `headway serve --event-log`, or of the vLLM plug-in")
    parser.add_argument("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="default: trace.json")


def run(arguments: argparse.Namespace) -> int:
    import msgspec

    from headway.sim.replay import read_log
    from headway.sim.report.live_trace import live_trace_events, timeline

    trace = timeline(of_an_engine(read_log(arguments.log), arguments.log))
    if not trace.slices and not trace.requests:
        raise ConfigError(f"{arguments.log} says of no request and no batch: there is nothing to draw")
    write_output(arguments.out, msgspec.json.encode(live_trace_events(trace)))
    lanes = len({(one.group, one.stage) for one in trace.slices})
    print(f"{len(trace.slices)} slices on {lanes} lanes, {len(trace.requests)} requests: {arguments.out}")
    return 0


def of_an_engine(events: Iterable[Mapping[str, Any]], path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the events of an engine's log. Raises ConfigError for a controller's log, which has no batches to draw."""
    from headway.control.log_reader import SCHEMAS

    for event in events:
        # Only the first line of a controller's log has its schema.
        if event.get("schema") in SCHEMAS:
            raise ConfigError(
                f"{path} is the log of a cluster's router; its instances', which can be drawn, are {path}.0, {path}.1 "
                "and so on"
            )
        yield event
