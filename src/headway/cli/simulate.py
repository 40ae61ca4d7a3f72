"""`headway simulate scenario.yaml`: how a policy and a layout behave on a workload, in virtual time. `headway compare`:
all policies, or all placements, on it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import ConfigError
from headway.core.files import check_outputs, write_output
from headway.core.parse import duration

if TYPE_CHECKING:
    from headway.sim.build import RunDetail, ScenarioRun
    from headway.sim.scenario import Scenario
    from headway.sim.sweep import ParsePoint, SweepPoint, Values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scenario",
        nargs="?",
        type=Path,
        help="a YAML file (examples/; fields: docs/reference/scenario-file.md), or one of `headway cluster`, of which "
        "an instance of each pool is loaded and measured",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="set a field, such as workload.qps=2"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="FIELD=…",
        help="values of a field, instead of the file's `sweep`: START:STOP:STEP or VALUE,VALUE,…; given twice: all "
        "combinations",
    )
    parser.add_argument("--seeds", metavar="N,N,…", help="seeds, instead of the file's; several give intervals")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--wide", action="store_true", help="every percentile and metric, wider than 80 columns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON ('-': stdout, no tables)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one row a point, class and metric")
    parser.add_argument(
        "--requests", type=Path, metavar="FILE", help="write one CSV row a request (first point and seed)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev (first point and seed)"
    )
    parser.add_argument(
        "--event-log",
        type=Path,
        metavar="FILE",
        help="write the engine's event log, for `headway why` and `headway trace` (first point and seed)",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write one HTML page: sentence, tables, charts")
    parser.add_argument(
        "--gantt",
        type=Path,
        metavar="FILE",
        help="of a cluster: draw instances over time, .png or .svg (first point and seed)",
    )
    parser.add_argument("--until", type=duration, metavar="S", help="with --gantt: the first so many seconds only")
    parser.add_argument(
        "--timings", action="store_true", help="measure the scheduler's own time (results then vary a little)"
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of scenario files and end")


def run(arguments: argparse.Namespace) -> int:
    from headway.sim.scenario import Scenario

    if arguments.schema:
        import json

        print(json.dumps(Scenario.model_json_schema(), indent=2))
        return 0
    return simulate(arguments, *read(arguments))


def read(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Values]]:
    """Return the scenario file with `--set` and `--seeds`, and what is swept. Raises ConfigError."""
    from headway.core.settings import seeds_of
    from headway.core.strict_yaml import read_yaml
    from headway.sim.sweep import parse_sweep, with_field

    if arguments.scenario is None:
        raise ConfigError("name a scenario file (such as examples/chat-and-documents.yaml) or --schema")

    data = read_yaml(str(arguments.scenario), commands=("simulate", "cluster"))
    trace = data.get("workload", {}).get("trace") if isinstance(data.get("workload"), dict) else None
    if isinstance(trace, str) and not Path(trace).is_absolute():  # beside the scenario, as one would expect
        beside = arguments.scenario.parent / trace
        data["workload"]["trace"] = str(beside if beside.exists() else trace)
    fixed = set()
    for text in arguments.set:
        field, values = parse_sweep(text, "--set")
        # --set shares the syntax of --sweep, which allows lists.
        if len(values) != 1:
            raise ConfigError(f"--set {text!r}: one value; use --sweep for several")
        data = with_field(data, field, values[0])
        fixed.add(field)
    if arguments.seeds:
        data = with_field(data, "run.seeds", list(seeds_of(arguments.seeds)))
    # What is no mapping of lists is refused with the other faults of the file.
    own = data.get("sweep") if "pools" not in data else None
    kept = {name: value for name, value in own.items() if name not in fixed} if isinstance(own, dict) else {}
    swept = [(name, value) for name, value in kept.items() if isinstance(value, list) and value]
    return data, [parse_sweep(text) for text in arguments.sweep] or swept


def simulate(arguments: argparse.Namespace, data: dict[str, Any], sweeps: list[Values]) -> int:
    """Run every point, print and write what comes out. Return 1 where no point could be simulated, else 0."""
    from rich.markup import escape

    from headway.core.settings import processes_of
    from headway.sim.report.tables import RunProgress, show, simulation_report
    from headway.sim.result import document
    from headway.sim.sweep import SweepPoint, parse_points, run_points, with_common_draws

    jobs = processes_of(arguments.jobs)
    parse = _parser(arguments.scenario, data)
    # The file itself is validated even where every field that it sets is swept.
    base = parse(data, str(arguments.scenario))
    data = dict(with_common_draws(data, sweeps, parse=parse))
    points = parse_points(data, sweeps, parse=parse) if sweeps else [SweepPoint({}, *base)]
    sound = [point for point in points if isinstance(point, SweepPoint)]
    first = sound[0].scenario
    if arguments.gantt is not None and first.cluster.placement is None:
        raise ConfigError("--gantt draws clusters: the scenario has no cluster.placement")
    if arguments.event_log is not None and first.cluster.placement is not None:
        raise ConfigError("--event-log is that of one engine: the scenario has a cluster.placement")
    _check_files(arguments)
    detail = _detail(arguments)
    with RunProgress(sum(len(point.scenario.run.seeds) for point in sound)) as progress:
        result = run_points(
            points,
            jobs,
            progress.done,
            first=detail,
            stopwatch=time.perf_counter if arguments.timings else None,
        )
    # Of a measured cluster only what was set: the defaults are of hardware that a scenario names.
    shown = base.scenario.model_dump(mode="json", by_alias=True, exclude_unset=base.cluster is not None)
    outcome = document(shown, result.points)
    parts = [simulation_report(outcome, arguments.wide), _band_line(sound[0], swept=len(points) > 1)]
    slowest = _slowest_words(arguments, result.points[0], first) if result.points[0]["feasible"] else ""
    # Where a file goes to stdout, it is alone there.
    if "-" not in map(str, (arguments.json, arguments.csv, arguments.requests, arguments.trace)):
        for part in parts:
            show(part)
        if slowest:
            print(slowest)
    _write(arguments, outcome)
    if arguments.report is not None:
        _write_page(arguments.report, [*parts, escape(slowest)], outcome, result.first)
    if result.first is not None:
        _write_first(arguments, first.name, result.first)
    # A file was asked for, but the first point did not fit its memory: there is no run to show.
    elif detail is not None:
        raise ConfigError(result.points[0]["why"])
    # A sweep may include points that do not fit; it fails only if none does.
    return 0 if any(point["feasible"] for point in result.points) else 1


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `headway simulate`; `--sweep` combines with what is compared."""
    add_arguments(parser)


def run_compare(arguments: argparse.Namespace) -> int:
    """`headway compare FILE`: every policy, or every placement, on one workload, a row each.

    One that the workload or the cluster does not suit is a row that says why."""
    data, _ = read(arguments)
    from headway.sim.sweep import parse_sweep

    field, names = alternatives(data)
    more = [parse_sweep(text) for text in arguments.sweep]
    return simulate(arguments, data, [*more, *([(field, names)] if field not in dict(more) else [])])


def alternatives(data: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return the field that says how a scenario is scheduled, and all of its values."""
    from headway.policy.iteration.ordering import POLICIES
    from headway.policy.placement import registry

    cluster = data.get("cluster")
    if "pools" in data:
        return "placement", registry.names()
    if isinstance(cluster, dict) and "placement" in cluster:
        return "cluster.placement", registry.names()
    if data.get("engine") == "vllm":
        return "vllm.scheduler", ["plugged", "default", "threshold:128", "threshold:512"]
    return "policy.policy", list(POLICIES)


def _parser(path: Path, data: dict[str, Any]) -> ParsePoint:
    """Return what validates the file's data: a scenario's, or a cluster file's."""
    from headway.sim.sweep import scenario_point

    if "pools" not in data:
        return scenario_point
    from headway.api.cluster_scenario import ClusterScenarios
    from headway.core.settings import environment

    return ClusterScenarios(path, environment()).parse


def _band_line(point: SweepPoint, swept: bool) -> str:
    """Return the error bars of a stage's latency model, for prompts of two lengths."""
    from headway.perf.latency.fitted import prefill_band
    from headway.sim.build import latency_of, layout_of, named

    long = 131_072
    if point.cluster is not None:
        latency, long = point.cluster.engines[0].latency, min(long, point.cluster.longest)
    else:
        scenario = point.scenario
        latency = latency_of(scenario.latency, *named(scenario), layout_of(scenario), scenario.engine)
    bands = ((tokens, prefill_band(latency, tokens)) for tokens in (2048, long))
    words = [f"a prompt of {tokens:,}: {band.words()}" for tokens, band in bands if band is not None]
    of = "the first point's predicted times" if swept else "predicted times"
    return f"error bars of {of} (P90): {'; '.join(words)}"


def _slowest_words(arguments: argparse.Namespace, point: dict[str, Any], scenario: Scenario) -> str:
    """Return the request of a point's first seed whose first token took longest, and the command that explains it."""
    from headway.sim.report.tables import slowest_line

    late, at = point["runs"][0]["slowest"], ", ".join(map(str, point["at"].values()))
    if late is None:
        return ""
    how = ""
    # Instances of a cluster write no event log of one engine.
    if scenario.cluster.placement is None:
        how = f"--log {arguments.event_log or 'events.jsonl'}"
    words = slowest_line(late, how, f" with {at}" if at else "")
    if how and arguments.event_log is None:
        words += "\n  after the same command with --event-log events.jsonl"
    return words


def _check_files(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a file that cannot be written: before minutes of simulation, not after them."""
    from headway.sim.report.plots import check_picture

    check_outputs(
        arguments.json, arguments.csv, arguments.requests, arguments.trace, arguments.event_log, arguments.report
    )
    check_picture(arguments.gantt)


def _detail(arguments: argparse.Namespace) -> RunDetail | None:
    """Return the detail to keep of the first run, for the output files that show it; None without such a file."""
    from headway.core.logs import LogSink
    from headway.sim.build import RunDetail

    shown = (arguments.requests, arguments.trace, arguments.report, arguments.gantt, arguments.event_log)
    if all(path is None for path in shown):
        return None
    log = None if arguments.event_log is None else LogSink(str(arguments.event_log))
    return RunDetail(arguments.trace is not None, arguments.gantt is not None, log)


def _write(arguments: argparse.Namespace, outcome: dict[str, Any]) -> None:
    """Write the files of all points."""
    if arguments.json is not None:
        write_output(arguments.json, _bytes(outcome))
    if arguments.csv is not None:
        from headway.sim.report.tables import summary_csv

        write_output(arguments.csv, summary_csv(outcome).encode())


def _write_page(file: Path, parts: list[Any], outcome: dict[str, Any], run: ScenarioRun | None) -> None:
    """Write the HTML page of all points, or of the first seed's requests where there is one point."""
    from headway.sim.report.page import request_charts, sweep_charts, write_page
    from headway.sim.report.tables import asked_classes

    if len(outcome["points"]) > 1:
        charts = sweep_charts(outcome, asked_classes(outcome))
    else:
        charts = [] if run is None else request_charts(run.sim.records)
    write_page(file, outcome["scenario"].get("name") or file.stem, parts, charts)


def _write_first(arguments: argparse.Namespace, name: str, run: ScenarioRun) -> None:
    """Write the files that show one run: the first point's first seed."""
    if arguments.gantt is not None and run.cluster is not None:
        from headway.sim.report import plots
        from headway.sim.report.plots import gantt_figure

        classes = {record.id: record.klass for record in run.sim.records}
        figure = gantt_figure(run.cluster.bars, run.cluster.instances, name, arguments.until, classes)
        plots.save(figure, arguments.gantt)
    if arguments.requests is not None:
        from headway.sim.report.tables import requests_csv

        write_output(arguments.requests, requests_csv(run.sim.records).encode())
    if arguments.trace is not None:
        from headway.sim.report.perfetto import simulation_trace

        write_output(arguments.trace, _bytes(simulation_trace(run.sim), compact=True))


def _bytes(data: Any, compact: bool = False) -> bytes:
    import msgspec

    body = msgspec.json.encode(data)
    return body if compact else msgspec.json.format(body, indent=1) + b"\n"
