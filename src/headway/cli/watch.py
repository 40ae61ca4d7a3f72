"""`headway watch LOG`: the live page of an event log, served on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log",
        type=Path,
        help="event log of `headway serve`, `cluster` or `simulate` (--event-log), or of the vLLM plug-in",
    )
    parser.add_argument("--port", type=int, default=8010, help="port on 127.0.0.1; 0 picks a free one (default: 8010)")


def run(arguments: argparse.Namespace) -> int:
    from headway.cli.why import say_differences
    from headway.core.machine import check_port
    from headway.serving.live.recordings import recording
    from headway.serving.live.watch import serve

    check_port(arguments.port)
    recorded = recording(arguments.log)
    say_differences(recorded)
    serve(recorded, arguments.log.name, arguments.port)
    return 0
