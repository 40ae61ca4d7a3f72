"""`headway trace EVENTLOG --out FILE`: what every stage of a live run did, for ui.perfetto.dev."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, help="an event log of `headway serve --event-log`")
    parser.add_argument("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="default: trace.json")


def run(arguments: argparse.Namespace) -> int:
    import msgspec

    from headway.report.live_trace import live_trace_events, timeline
    from headway.simulator.replay import read_log

    told = timeline(read_log(arguments.log))
    arguments.out.write_bytes(msgspec.json.encode(live_trace_events(told)))
    lanes = len({(one.group, one.stage) for one in told.slices})
    print(f"{len(told.slices)} slices on {lanes} lanes, {len(told.requests)} requests: {arguments.out}")
    return 0
