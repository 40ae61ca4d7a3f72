"""`headway bench` replays a trace; `headway bench convoy`. The CLI registers this; heavy imports wait for `run`."""

from __future__ import annotations

import argparse

from headway.serving.load import convoy as convoy_command
from headway.serving.load import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a replay, and the sub-command `convoy`."""
    load.add_arguments(parser)
    commands = parser.add_subparsers(dest="bench_command", metavar="convoy", required=False)
    convoy = commands.add_parser("convoy", help="one long prompt and short ones at a fixed rate: the waits of both")
    convoy_command.add_arguments(convoy)


def run(args: argparse.Namespace) -> int:
    """Run the replay or the convoy; return the exit status."""
    if args.bench_command == "convoy":
        return convoy_command.run(args)
    return load.run(args)
