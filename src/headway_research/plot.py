"""Picture of a report: its panels below each other, in the house style, with a name at the end of each line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from headway.sim.report.page import ReportChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_MARKED = 100
"""Points of a line up to which each has a mark."""
LABEL_CHARS = 20
"""Length at which a line's name is broken."""
PANEL_IN = 3.4
"""Height of a panel."""


def draw(panels: Sequence[ReportChart], file: Path, title: str = "") -> list[Path]:
    """Write the picture (`.png`, `.svg`, or both without a suffix). title: above all panels, what they show."""
    from headway.sim.report.plots import house_style, new_figure, save

    with house_style():
        figure = new_figure(height_in=PANEL_IN * len(panels) + 0.4 * (title.count("\n") + 1 if title else 0))
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            _draw_panel(axes, panel)
        if title:
            figure.suptitle(title, fontweight="bold", fontsize=14, x=0.01, ha="left")
    return save(figure, file)


def _draw_panel(axes: Axes, panel: ReportChart) -> None:
    from matplotlib.ticker import PercentFormatter

    from headway.sim.report.plots import COLOURS, MARKERS, label_lines, line_colours, seconds_axis

    lines = {label: sorted(points) if panel.log_x else list(points) for label, points in panel.lines.items() if points}
    ends = []
    for index, ((label, points), colour) in enumerate(zip(lines.items(), line_colours(list(lines)), strict=True)):
        x, y = zip(*points, strict=True)
        # Beyond the last colour they come again, dashed.
        style = "-" if index < len(COLOURS) else "--"
        # Of many points the line alone is seen.
        marker = MARKERS[index % len(MARKERS)] if len(points) <= MOST_MARKED else None
        axes.plot(x, y, "" if panel.dots else style, lw=1.8, markersize=5, color=colour, marker=marker)
        ends.append((float(y[-1]), fill(label, LABEL_CHARS), colour))
    axes.set_title(panel.title, fontweight="bold", fontsize=12)
    axes.set_xlabel(f"{panel.x}\n{panel.note}" if panel.note else panel.x)
    axes.set_ylabel(panel.y)
    if panel.log_x:
        axes.set_xscale("log")
        _mark_points(axes, sorted({float(x) for points in lines.values() for x, _ in points}))
    if panel.log_y:
        axes.set_yscale("log")
    if panel.unit == "share":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.unit == "seconds":
        seconds_axis(axes, "y")
    label_lines(axes, ends, PANEL_IN - 1.0)


MOST_TICKS = 8


def _mark_points(axes: Axes, values: Sequence[float]) -> None:
    """Write the values of a logarithmic x axis below it where they are few, else only decades."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    axes.xaxis.set_minor_formatter(NullFormatter())
    if 1 < len(values) <= MOST_TICKS and math.log10(values[-1] / values[0]) > 0.1 * len(values):
        axes.set_xticks(values)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
