"""Pictures of a load run: cumulative distributions per class, and each request's wait over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headway.sim.metrics import RequestRecord
from headway.sim.metrics.definitions import tbt_s, ttft_s
from headway.sim.report.style import COLOURS, MARKERS, house_style, new_figure
from headway.sim.report.tables import tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def load_figure(records: Sequence[RequestRecord]) -> Figure:
    """Draw three panels: CDF of TTFT, CDF of TBT, TTFT by arrival time. Classes differ in colour, line and marker."""
    by_class: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.ok:
            by_class.setdefault(record.klass or "all", []).append(record)
    with house_style():
        figure = new_figure(height_in=3.6)
        first, gaps, over_time = figure.subplots(1, 3)
        ttfts = {k: [s for r in mine if (s := ttft_s(r)) is not None] for k, mine in by_class.items()}
        draw_cdf(first, ttfts, "time to first token")
        draw_cdf(
            gaps, {k: [gap for r in mine for gap in tbt_s(r)] for k, mine in by_class.items()}, "time between tokens"
        )
        for index, mine in enumerate(by_class.values()):
            points = [(r.arrival_s, s) for r in mine if (s := ttft_s(r)) is not None and s > 0]
            marker, colour = MARKERS[index % len(MARKERS)], COLOURS[index % len(COLOURS)]
            over_time.plot(
                *zip(*points, strict=True), marker, color=colour, markersize=4, alpha=0.8
            ) if points else None
        over_time.set_title("time to first token by arrival", fontweight="bold", fontsize=11)
        over_time.set_xlabel("arrival, seconds")
        over_time.set_yscale("log")
        seconds_axis(over_time, "y")
        if len(by_class) > 1:
            # Below the panels: inside one it would lie on a curve.
            handles, labels = first.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=4, handlelength=2.4)
    return figure


def cdf_figure(samples: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw one panel with the cumulative distribution of each named sample of seconds, on a log axis."""
    with house_style():
        figure = new_figure(height_in=3.8)
        axes = figure.subplots()
        draw_cdf(axes, samples, title)
        axes.legend(loc="lower right", handlelength=2.4)
    return figure


def draw_cdf(axes: Axes, samples: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw cumulative distributions. Zeros (tokens of one chunk) cannot show on a log axis: they lift its start."""
    for index, (name, values) in enumerate(samples.items()):
        ordered = np.sort(np.asarray(values, dtype=float))
        if ordered.size == 0:
            continue
        shares = np.arange(1, ordered.size + 1) / ordered.size
        seen = ordered > 0
        style = ("-", "--", "-.", ":")[index % 4]
        axes.step(
            ordered[seen], shares[seen], style, where="post", color=COLOURS[index % len(COLOURS)], lw=1.8, label=name
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.01)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title(title, fontweight="bold", fontsize=11)
    seconds_axis(axes, "x")


def seconds_axis(axes: Axes, which: str) -> None:
    """Label a log axis in ms and s, with as many ticks as have room. Called when the axis has its limits."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    decades = math.log10(high / low) if 0 < low < high else 1.0
    # Words such as "300 ms" stand side by side below an axis, and under each other beside one.
    fine, coarse = (1.9, 3.5) if which == "x" else (4.0, 8.0)
    subs = (1.0, 3.0) if decades <= fine else (1.0,)
    # Of many decades every second one has a tick, or every third.
    axis.set_major_locator(LogLocator(base=10.0 ** math.ceil(decades / coarse), subs=subs, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axis.set_minor_formatter(NullFormatter())
