"""Draw the clusters of the docs from examples/: `python scripts/make_cluster_figures.py`. Minutes.

cluster-tetris.png, cluster-fifo.png and cluster-ladder.png: instances over time; cluster-cdf.png: TTFT and JCT of three
placements on the same requests; cluster-capacity.png: TTFT over the load, with its knee where a monotone fit supports
one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from headway.sim.cluster.build import run_cluster
from headway.sim.metrics import RequestRecord, e2e_s, ttft_s
from headway.sim.report import plots
from headway.sim.report.page import ReportChart, sweep_charts
from headway.sim.report.plots import gantt_figure
from headway.sim.report.tables import asked_classes
from headway.sim.result import document
from headway.sim.scenario import parse_scenario
from headway.sim.sweep import parse_points, parse_sweep, run_points, with_common_draws, with_field
from headway_research.plot import draw

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
LOADS = "workload.qps=1,2,3,4,5,6"
SEEDS = [0, 1, 2]
PLACEMENTS = ("ladder", "tetris", "fixed-sp")


def example(name: str) -> dict[str, Any]:
    """An example's data."""
    data: dict[str, Any] = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    return data


def gantt(data: Mapping[str, Any], out: str, until_s: float, title: str) -> None:
    """The first seconds of a scenario. title: what they show."""
    result = run_cluster(parse_scenario(with_field(data, "run.window_s", until_s)), 0, keep_bars=True)
    classes = {record.id: record.klass for record in result.sim.records}
    plots.save(gantt_figure(result.bars, result.instances, title, until_s, classes), FIGURES / out)


def placed(data: dict[str, Any], placement: str) -> dict[str, Any]:
    """The same requests under another placement, in groups of four where groups are fixed."""
    options = {"sp": 4} if placement == "fixed-sp" else data["cluster"].get("options", {})
    return with_field(with_field(data, "cluster.placement", placement), "cluster.options", options)


def main() -> int:
    FIGURES.mkdir(parents=True, exist_ok=True)
    gantt(example("cluster-tetris"), "cluster-tetris.png", 16.0, "Tetris: chunks of a prompt on ever larger groups")
    data = example("cluster-combined")
    fifo = with_field(with_field(data, "cluster.placement", "fifo"), "cluster.options", {})
    gantt(fifo, "cluster-fifo.png", 24.0, "First come, first served: chats wait behind documents")
    gantt(data, "cluster-ladder.png", 24.0, "The ladder: documents pause for chats")
    runs = {name: run_cluster(parse_scenario(placed(data, name)), 0).sim.records for name in PLACEMENTS}
    draw(
        [
            cumulative("time to first token, chats", runs, ttft_s),
            cumulative("job completion time, chats", runs, e2e_s),
        ],
        FIGURES / "cluster-cdf.png",
        "Under the ladder a chat's first token comes within a second or so",
    )
    draw_capacity(data)
    return 0


def cumulative(
    title: str, runs: Mapping[str, Sequence[RequestRecord]], seconds: Callable[[RequestRecord], float | None]
) -> ReportChart:
    """The times of each run's chats by the share that had less; those that have none so far do not count."""
    times = {
        name: sorted(s for one in records if one.klass == "chat" and (s := seconds(one)) is not None)
        for name, records in runs.items()
    }
    lines = {name: [(100 * (n + 1) / len(mine), s) for n, s in enumerate(mine)] for name, mine in times.items()}
    return ReportChart(title=title, x="percentile of chats", lines=lines, unit="seconds", log_y=True)


def draw_capacity(data: dict[str, Any]) -> None:
    """TTFT over the load under two placements, with the same requests at every load, and three seeds."""
    points = []
    for name in PLACEMENTS[:2]:
        sweeps = [parse_sweep(LOADS)]
        at_all_loads = with_common_draws(with_field(placed(data, name), "run.seeds", SEEDS), sweeps)
        swept = run_points(parse_points(at_all_loads, sweeps), os.cpu_count() or 1).points
        points += [{**point, "at": {**point["at"], "cluster.placement": name}} for point in swept]
    found = document(data, points)
    charts = [replace(one, x="requests a second") for one in sweep_charts(found, asked_classes(found))]
    draw(charts, FIGURES / "cluster-capacity.png", "Chats stay in time under the ladder as the load grows")


if __name__ == "__main__":
    sys.exit(main())
