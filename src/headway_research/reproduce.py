"""`headway reproduce medha.fig13`: a paper's claims beside the results of Headway's scheduler and models."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files import check_outputs, write_output
from headway.core.parse import duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id",
        nargs="?",
        help="an experiment, such as medha.fig13 (see --list); a paper (medha, mnemosyne, tetris, pecsched, "
        "packing-prefetch) for its headline claims beside the last full run's; or all",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print id, cost, verdicts of the last full run and title of each, and totals, and end",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write claims and curves as JSON ('-': stdout; with all: a directory)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="draw it: .png, .svg, both without a suffix; default ID.png (with all: a directory)",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write one HTML page: sentence, claims, curves (with all: a directory)",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test of seconds, not a reproduction")
    parser.add_argument("--seeds", metavar="N,N,…", help="seeds of simulations, instead of the experiment's")
    parser.add_argument("--window", type=duration, metavar="S", help="observed seconds, instead of the experiment's")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (default: one a core)")


def run(arguments: argparse.Namespace) -> int:
    from headway.sim.report.plots import check_picture
    from headway_research.registry import experiment, listing, names

    if arguments.list:
        print(listing())
        return 0
    if arguments.id is None:
        raise ConfigError("name an experiment (`headway reproduce --list` shows them), or all")
    from headway_research.papers import PAPERS, page

    if arguments.id in PAPERS:
        from headway.sim.report.page import write_page
        from headway.sim.report.tables import show

        check_outputs(arguments.report)
        shown = page(PAPERS[arguments.id])
        show(shown)
        if arguments.report is not None:
            write_page(arguments.report, f"headway reproduce {arguments.id}", [shown], [])
        return 0
    if arguments.id != "all":
        # Raises ConfigError for an unknown id before anything runs.
        experiment(arguments.id)
        picture = arguments.plot if arguments.plot is None or arguments.plot.name else Path(f"{arguments.id}.png")
        check_outputs(arguments.json, arguments.report)
        check_picture(picture)
        _one(arguments.id, arguments, (arguments.json, picture, arguments.report), arguments.id)
        return 0
    for folder in (arguments.json, arguments.plot, arguments.report):
        # With all, each experiment writes a file of its own.
        if folder is not None and (str(folder) == "-" or folder.is_file()):
            raise ConfigError(f"with all, --json, --plot and --report name a directory, not {folder}")
    check_picture(None if arguments.plot is None else arguments.plot / "all.png")
    for number, name in enumerate(names(), 1):
        folders = ((arguments.json, "json"), (arguments.plot, "png"), (arguments.report, "html"))
        outputs = [None if folder is None else folder / f"{name}.{suffix}" for folder, suffix in folders]
        _one(name, arguments, outputs, f"{name}, {number} of {len(names())}")
    return 0


def _one(name: str, arguments: argparse.Namespace, outputs: Sequence[Path | None], words: str) -> None:
    """Run one experiment, print or write what comes out. outputs: JSON, picture, page. words: beside its progress."""
    from headway.sim.report.tables import StepBar, show
    from headway_research.registry import EXPERIMENTS, experiment
    from headway_research.table import report_table

    with StepBar(words) as progress:
        report = experiment(name)(_options(arguments, progress))
    data = report.to_json(name)
    json_file, picture, page_file = outputs
    shown = report_table(data, EXPERIMENTS[name].title)
    if json_file is not None and str(json_file) == "-":
        sys.stdout.buffer.write(_bytes(data))
    else:
        show(shown)
        if json_file is not None:
            write_output(json_file, _bytes(data))
    if page_file is not None:
        from headway.sim.report.page import write_page

        write_page(page_file, f"headway reproduce {name}", [shown], report.panels)
    # Some experiments have claims only and nothing to draw.
    if picture is not None and report.panels:
        from headway_research.plot import draw

        draw(report.panels, picture)


def _options(arguments: argparse.Namespace, on_progress: Callable[[int, int], None]) -> Any:
    from headway.core.settings import processes_of, seeds_of
    from headway_research.base import RunOptions

    seeds = seeds_of(arguments.seeds) if arguments.seeds else None
    if arguments.window is not None and not arguments.window > 0:
        raise ConfigError(f"--window must be above 0 seconds, not {arguments.window:g}")
    return RunOptions(
        quick=arguments.quick,
        seeds=seeds,
        window_s=arguments.window,
        jobs=processes_of(arguments.jobs),
        stopwatch=time.perf_counter,
        on_progress=on_progress,
    )


def _bytes(data: Any) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"
