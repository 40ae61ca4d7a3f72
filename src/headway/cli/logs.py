"""Commands that read a server's event log: `headway trace`, `watch`, `why` and `profile check`."""

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


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log",
        type=Path,
        help="event log of `headway serve` or `cluster` (--event-log), or of the vLLM plug-in",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("trace.json"), metavar="FILE", help="where to write it (default: trace.json)"
    )


def run_trace(arguments: argparse.Namespace) -> int:
    """`headway trace EVENTLOG --out FILE`: convert an engine's event log to a trace for ui.perfetto.dev."""
    import msgspec

    from headway.sim.replay import ClusterLogRun, open_log
    from headway.sim.report.perfetto import cluster_trace, engine_trace

    log = open_log(arguments.log)
    with reading(f"{arguments.log} is damaged", ConfigError):
        if isinstance(log, ClusterLogRun):
            trace = cluster_trace(log)
            counts = f"{len(log.spans)} spans, {len(log.transfers)} KV transfers, {len(log.requests)} requests"
            drawn = f"{len(log.instances)} instances, {counts}"
        else:
            trace = engine_trace(log)
            drawn = trace.described()
            if all(event["ph"] == "M" for event in trace.events):
                raise ConfigError(f"{arguments.log} has no request and no batch: there is nothing to draw")
    write_output(arguments.out, msgspec.json.encode(trace.to_json()))
    # Where the trace goes to stdout, it is alone there.
    print(f"{drawn}: {arguments.out}", file=sys.stderr if str(arguments.out) == "-" else sys.stdout)
    return 0


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log",
        type=Path,
        help="event log of `headway serve`, `cluster` or `simulate` (--event-log), or of the vLLM plug-in",
    )
    parser.add_argument("--port", type=int, default=8010, help="port on 127.0.0.1; 0 picks a free one (default: 8010)")


def run_watch(arguments: argparse.Namespace) -> int:
    """`headway watch LOG`: the live page of an event log, served on this machine."""
    from headway.core.machine import check_port
    from headway.serving.live.pages import serve
    from headway.serving.live.recordings import recording

    check_port(arguments.port)
    recorded = recording(arguments.log)
    say_differences(recorded)
    serve(recorded, arguments.log.name, arguments.port)
    return 0


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_why(arguments: argparse.Namespace) -> int:
    """`headway why REQUEST_ID --log EVENTLOG|--url SERVER`: what a request waited for, and under other policies."""
    import msgspec

    from headway.sim.report.plots import check_picture
    from headway.sim.report.why import why_json, why_text

    check_outputs(arguments.json)
    check_picture(arguments.picture)
    explanation, simulated = _explanation(arguments)
    if arguments.json is None or str(arguments.json) != "-":
        print(fitting(why_text(explanation, simulated)))
    if arguments.json is not None:
        body = msgspec.json.format(msgspec.json.encode(why_json(explanation, simulated)), indent=1) + b"\n"
        if str(arguments.json) == "-":
            sys.stdout.buffer.write(body)
        else:
            write_output(arguments.json, body)
    if arguments.picture is not None:
        from headway.sim.report.why import draw_why

        draw_why(explanation, arguments.picture)
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


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, help="an event log of `headway serve --event-log`, or of the vLLM plug-in")
    parser.add_argument(
        "--corrected",
        action="store_true",
        help="simulate with the profile as the run's iterations correct it (default: as it was at the start)",
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the profile, corrected by the run's iterations"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison as JSON")


def run_check(arguments: argparse.Namespace) -> int:
    """Replays a recorded live run (`headway serve --event-log FILE`) and says how far predictions are from
    measurements."""
    import msgspec

    from headway.serving.live.recordings import replayed as replayed_run
    from headway.sim.calibration import calibrate
    from headway.sim.replay import engine_log
    from headway.sim.report.tables import calibration_report, show

    replayed = replayed_run(engine_log(arguments.log), arguments.log)
    result = calibrate(replayed, arguments.corrected)
    # Replay decides every batch again: a difference means other code or another profile than the recorded run's.
    for line in replayed.differences:
        print(f"a decision differs: {line}")
    print(f"{len(replayed.batches)} iterations replayed, {len(replayed.differences) or 'no'} decisions differ")
    show(calibration_report(result.to_json()))
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result.to_json()), indent=1))
    if arguments.save is not None:
        from headway.perf.latency import table
        from headway.serving.load.calibration import learned_table, overhead_of

        source, _ = learned_table(replayed.table.source, replayed)
        serving = overhead_of(replayed, ())
        if source.serving is not None:
            # What clients saw is not in the log.
            seen = serving.with_way_of(source.serving) if source.serving.request_s else serving
            woken = sum(each.woken_s is not None for each in replayed.batches)
            serving = seen.with_unmeasured_of(source.serving, woken)
        table.save(msgspec.structs.replace(source, serving=serving), arguments.save)
    return 1 if replayed.differences else 0
