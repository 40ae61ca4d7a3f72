"""Picture of a report: its panels side by side, in the house style."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway.sim.report.page import ReportChart

MOST_MARKED = 100
"""Points of a line up to which each has a mark."""


def draw(panels: Sequence[ReportChart], file: Path) -> list[Path]:
    """Write the picture (`.png`, `.svg`, or both without a suffix)."""
    from headway.sim.report.plots import COLOURS, MARKERS, house_style, new_figure, save

    with house_style():
        figure = new_figure(height_in=4.0)
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for index, (label, points) in enumerate(panel.lines.items()):
                if not points:
                    continue
                x, y = zip(*points, strict=True)
                # Beyond the last colour they come again, dashed.
                style = "-" if index < len(COLOURS) else "--"
                # Of many points the line alone is seen.
                marker = MARKERS[index % len(MARKERS)] if len(points) <= MOST_MARKED else None
                axes.plot(x, y, style, label=label, lw=1.6, markersize=4, color=COLOURS[index % len(COLOURS)],
                          marker=marker)  # fmt: skip
            axes.set_title(panel.title, fontweight="bold", fontsize=11)
            axes.set_xlabel(f"{panel.x}\n{panel.note}" if panel.note else panel.x)
            axes.set_ylabel(panel.y)
            if panel.log_x:
                axes.set_xscale("log")
            if panel.log_y:
                axes.set_yscale("log")
            axes.legend(fontsize=8)
    return save(figure, file)
