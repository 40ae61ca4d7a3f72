"""`headway why REQUEST_ID --log EVENTLOG`: what a request waited for, and what another policy would have done."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", help="its id, or a part of it that no other id has")
    parser.add_argument(
        "--log",
        type=Path,
        required=True,
        metavar="FILE",
        help="event log of `headway serve` or `headway simulate` (--event-log), or of the vLLM plug-in",
    )
    parser.add_argument(
        "--under",
        action="append",
        default=[],
        metavar="POLICY|SETTING=VALUE",
        help="simulate the same requests under fcfs, t_target_ms=100, …; may be repeated",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it as JSON ('-': stdout, no text)")


def run(arguments: argparse.Namespace) -> int:
    import sys

    import msgspec

    from headway.cli.trace import of_an_engine
    from headway.sim.counterfactual import outcomes
    from headway.sim.explanation import explain
    from headway.sim.replay import read_log, replay
    from headway.sim.report.why_text import why_json, why_text

    run = replay(of_an_engine(read_log(arguments.log), arguments.log), detail=True)
    if run.differences:
        # What the log says itself still holds; which requests decoded in an iteration comes from the replay.
        print(f"this version decides otherwise than the recorded run: {run.differences[0]}", file=sys.stderr)
    told = explain(run, arguments.request)
    simulated = outcomes(run, told.record.id, arguments.under) if arguments.under else []
    if arguments.json is None or str(arguments.json) != "-":
        print(why_text(told, simulated))
    if arguments.json is not None:
        body = msgspec.json.format(msgspec.json.encode(why_json(told, simulated)), indent=1) + b"\n"
        if str(arguments.json) == "-":
            sys.stdout.buffer.write(body)
        else:
            arguments.json.write_bytes(body)
    return 0
