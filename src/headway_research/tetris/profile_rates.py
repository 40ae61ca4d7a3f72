"""`headway profile rates SCENARIO --out FILE`: Tetris's improvement rates by load, for a cluster and its lengths.

Simulates the scenario's prefill instances and lengths under Poisson arrivals at each load and with each candidate rate,
and keeps the rate with the least mean TTFT (§5.1). The file goes into a scenario as `cluster.options.rates_file`, and
into a running cluster by --url (`PUT /v1/cluster/rates`). With --lengths the prompts are those that a cluster has been
sent; with --every too, the newest of its log are taken again and again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files import read_lines, write_output
from headway.core.parse import duration

_SEND_TIMEOUT_S = 30.0


class _TryLaterError(ConfigError):
    """No log, or one without requests so far, or a cluster that does not take the rates: --every tries again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, help="a scenario file with `cluster.placement: tetris`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write the table (JSON)")
    parser.add_argument(
        "--loads", default="0.5:5.0:0.5", metavar="START:STOP:STEP", help="requests a second (default: 0.5:5.0:0.5)"
    )
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="requests a simulation (default: 1000)")
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="draw prompt lengths from a cluster's log (headway cluster --event-log) or a trace, not from the scenario",
    )
    parser.add_argument("--seeds", default="1000,1001", metavar="N,N,…", help="seeds (default: 1000,1001)")
    parser.add_argument("--url", help="a running cluster, which then works with the table")
    parser.add_argument("--api-key", metavar="KEY", help="with --url: the server's API key")
    parser.add_argument(
        "--every",
        type=duration,
        metavar="SECONDS",
        help="with --url, and a cluster's log as --lengths: again so long after each table, of the log's newest "
        "--requests prompts, until Ctrl-C",
    )


def run(arguments: argparse.Namespace) -> int:
    from headway.serving.load.client import server_root

    every = arguments.every
    if every is not None and (not 0 < every <= 1e7 or None in (arguments.lengths, arguments.url)):
        raise ConfigError("--every is above 0 and at most 1e7 seconds, and needs --lengths and --url")
    if arguments.url is not None:
        # Before the simulations, which take minutes.
        server_root(arguments.url)
    while True:
        try:
            with TemporaryDirectory() as folder:
                _profile(arguments, Path(folder))
        except _TryLaterError as error:
            if every is None:
                raise
            print(f"headway: warning: {error}", file=sys.stderr)
        if every is None:
            return 0
        sleep(every)


def _profile(arguments: argparse.Namespace, folder: Path) -> None:
    import msgspec

    from headway.core.settings import seeds_of
    from headway.core.strict_yaml import read_yaml
    from headway.policy.placement.contract import RateTable
    from headway.sim.scenario import parse_scenario
    from headway.sim.sweep import parse_sweep
    from headway_research.tetris.rates import CANDIDATES, best_rates, scenario_ttft_s

    data = read_yaml(str(arguments.scenario), commands=("simulate",))
    if arguments.lengths is not None:
        newest = None if arguments.every is None else arguments.requests
        lengths = f"empirical:{_trace_of(arguments.lengths, folder, newest)}"
        data = {**data, "workload": {"mix": [{"prompt": lengths, "output": "fixed:1"}], "qps": 1.0, "requests": 10}}
    scenario = parse_scenario(data, str(arguments.scenario))
    if scenario.cluster.placement != "tetris":
        raise ConfigError(f"{arguments.scenario}: cluster.placement must be tetris, not {scenario.cluster.placement}")
    if arguments.requests < 10:
        raise ConfigError(f"--requests must be at least 10, not {arguments.requests}")
    loads = [float(load) for load in _numbers(parse_sweep(f"loads={arguments.loads}")[1])]
    seeds = seeds_of(arguments.seeds)

    # Mean TTFT over the seeds, each with the same number of requests (§5.1).
    def mean_s(load: float, rate: float) -> float:
        return sum(scenario_ttft_s(data, load, rate, arguments.requests, seed) for seed in seeds) / len(seeds)

    points: list[tuple[float, float]] = []
    for load in loads:
        # One load at a time, to show progress.
        points += best_rates([load], CANDIDATES, mean_s)
        print(f"{load:g} requests/s: improvement rate {points[-1][1]:g}", flush=True)
    lengths_of = f", lengths of {arguments.lengths.name}" if arguments.lengths is not None else ""
    source = (
        f"{scenario.name or arguments.scenario.name}: {arguments.requests} Poisson requests a load{lengths_of}, "
        "least mean TTFT"
    )
    table = RateTable(points=tuple(points), source=source)
    write_output(arguments.out, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    print(f"written to {arguments.out}")
    if arguments.url is not None:
        _send(arguments.url, arguments.api_key, msgspec.to_builtins(table))


def _send(url: str, api_key: str | None, table: dict[str, Any]) -> None:
    """Give a running cluster its rates."""
    from headway.serving.load.client import ask, server_root

    root = server_root(url)
    try:
        ask("PUT", f"{root}/v1/cluster/rates", api_key, table, _SEND_TIMEOUT_S)
    except ConfigError as error:
        raise _TryLaterError(str(error)) from None
    print(f"in use at {root}", flush=True)


def _trace_of(file: Path, folder: Path, newest: int | None = None) -> Path:
    """Return a trace with the lengths of a cluster's log, written to `folder`; `file` itself if it is no such log.

    newest: only of so many last prompts; then no other file will do. Raises ConfigError, and `_TryLaterError` where
    requests may still come."""
    from headway.control.log import read_log
    from headway.sim.replay import is_cluster_log

    if not file.exists() or (file.is_file() and not file.stat().st_size):
        # The server may start later, or write its log's first line.
        raise _TryLaterError(f"{file} does not exist, or is empty: there are no lengths to draw from")
    if not is_cluster_log(file):
        if newest is not None:
            raise ConfigError(f"{file} is no log of a cluster (headway cluster --event-log), as --every needs it")
        return file
    events = [line["of"] for _, line in read_log(read_lines(file))[1] if line["event"] == "decided"]
    arrived = [fields["request"] for kind, fields in events if kind == "RequestArrived"]
    # another attempt at a request is no new one: they are named id#1, id#2, …
    prompts = {request["id"].rpartition("#")[0] or request["id"]: request for request in arrived}
    if not prompts:
        raise _TryLaterError(f"{file} has no requests yet: there are no lengths to draw from")
    rows = [f"0,{request['prompt_tokens']},1" for request in list(prompts.values())[-(newest or len(prompts)) :]]
    trace = folder / "lengths.csv"
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return trace


def _numbers(values: list[Any]) -> list[float]:
    try:
        found = [float(value) for value in values]
    except (TypeError, ValueError):
        raise ConfigError(f"--loads: {values} are not all numbers") from None
    if not all(value > 0 for value in found):
        raise ConfigError("--loads must be above 0 requests a second")
    return found
