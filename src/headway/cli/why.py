"""`headway why REQUEST_ID --log EVENTLOG|--url SERVER`: what a request waited for, and what another policy would do."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.command_parser import fitting
from headway.core.errors import ConfigError, reading
from headway.core.files import check_outputs, write_output

if TYPE_CHECKING:
    from headway.serving.live.recordings import RecordedRun
    from headway.sim.explanation import CounterfactualOutcome, RequestExplanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", help="its id, or a part of it that no other id has")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="event log of `headway serve`, `cluster` or `simulate` (--event-log), or of the vLLM plug-in",
    )
    source.add_argument("--url", help="a running server or cluster; --under needs one with --event-log")
    parser.add_argument("--api-key", metavar="KEY", help="with --url: the server's API key")
    parser.add_argument(
        "--under",
        action="append",
        default=[],
        metavar="POLICY|SETTING=VALUE",
        help="simulate the same requests under fcfs, t_target_ms=100, …; may be repeated",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it: .png, .svg, or both without a suffix")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it as JSON ('-': stdout, no text)")


def run(arguments: argparse.Namespace) -> int:
    import msgspec

    from headway.sim.report.plots import check_picture
    from headway.sim.report.why import why_json, why_text

    check_outputs(arguments.json)
    check_picture(arguments.picture)
    told, simulated = _explanation(arguments)
    if arguments.json is None or str(arguments.json) != "-":
        print(fitting(why_text(told, simulated)))
    if arguments.json is not None:
        body = msgspec.json.format(msgspec.json.encode(why_json(told, simulated)), indent=1) + b"\n"
        if str(arguments.json) == "-":
            sys.stdout.buffer.write(body)
        else:
            write_output(arguments.json, body)
    if arguments.picture is not None:
        from headway.sim.report.why import draw_why

        draw_why(told, arguments.picture)
    return 0


def _explanation(arguments: argparse.Namespace) -> tuple[RequestExplanation, list[CounterfactualOutcome]]:
    """Return the explanation, and what `--under` asks for."""
    from headway.serving.live.recordings import recording

    if arguments.url is not None:
        return _asked(arguments)
    recorded = recording(arguments.log)
    say_differences(recorded)
    with reading(f"{arguments.log} is damaged", ConfigError):
        return recorded.why(arguments.request, arguments.under)


def say_differences(recorded: RecordedRun) -> None:
    """Say on stderr where this version decides otherwise than the recorded run: explanations then may not hold."""
    if recorded.differs is not None:
        print(f"this version decides otherwise than the recorded run: {recorded.differs}", file=sys.stderr)


def _asked(arguments: argparse.Namespace) -> tuple[RequestExplanation, list[CounterfactualOutcome]]:
    """Return the explanation of a running server."""
    from urllib.parse import quote, urlencode

    from headway.serving.load.client import ask, server_root
    from headway.sim.report.why import why_of

    under = urlencode([("under", setting) for setting in arguments.under])
    url = f"{server_root(arguments.url)}/v1/requests/{quote(arguments.request, safe='')}/why?{under}"
    try:
        return why_of(ask("GET", url, arguments.api_key))
    except (KeyError, TypeError):
        raise ConfigError(f"{url} answers no explanation: it is no Headway server of this version") from None
