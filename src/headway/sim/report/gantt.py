"""Gantt chart of a cluster run, instance × time: spans, holds, pauses, transfers. PNG or SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.policy.placement.view import ClusterInstance
from headway.sim.cluster.result import GanttBar
from headway.sim.report.style import BAND, COLOURS, FAINT, INK, house_style, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 20_000
"""Most bars in a picture; bars that begin later are left out, and the title has their number."""


def shown(bars: Sequence[GanttBar], until_s: float | None) -> tuple[list[GanttBar], float]:
    """Return the bars that a picture shows, and the end of its time axis in seconds."""
    chosen = sorted((b for b in bars if until_s is None or b.start_s < until_s), key=lambda b: (b.start_s, b.instance))
    # sorted by start, so the latest bars are dropped
    chosen = chosen[:MOST_BARS]
    end_s = max((bar.end_s for bar in chosen), default=1.0)
    return chosen, min(end_s, until_s) if until_s is not None else end_s


def colours(bars: Sequence[GanttBar]) -> dict[str, str]:
    """Return a colour for each request, in order of first appearance."""
    names = dict.fromkeys(bar.request for bar in bars if bar.kind == "span")
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def gantt_figure(
    bars: Sequence[GanttBar], instances: Sequence[ClusterInstance], title: str = "", until_s: float | None = None
) -> Figure:
    """Draw one row for each instance, nodes apart.

    Spans are coloured by request and named where the bar is wide enough; batches of an instance's scheduler are grey,
    holds and pauses are outlines, transfers are thin lines under their sender.
    """
    chosen, end_s = shown(bars, until_s)
    colour = colours(chosen)
    rows, ticks, labels = {}, [], []
    at, node = 0.0, instances[0].node if instances else 0
    for instance in instances:
        at += 0.4 if instance.node != node else 0.0
        node = instance.node
        rows[instance.id] = at
        ticks.append(at)
        labels.append(f"{instance.role[0].upper()}{instance.id}")
        at += 1.0
    with house_style():
        figure = new_figure(height_in=min(12.0, 1.2 + 0.24 * at))
        axes = figure.subplots()
        for bar in chosen:
            y, width = rows[bar.instance], bar.end_s - bar.start_s
            if bar.kind == "span":
                axes.barh(y, width, left=bar.start_s, height=0.82, color=colour[bar.request], edgecolor="white", lw=0.4)
                # narrower bars cannot hold a name
                if width > 0.04 * end_s:
                    axes.text(
                        bar.start_s + width / 2, y, bar.request, ha="center", va="center", fontsize=6, color="white"
                    )
            elif bar.kind == "batch":
                axes.barh(y, width, left=bar.start_s, height=0.5, color=BAND, edgecolor=FAINT, lw=0.2)
            elif bar.kind == "transfer":
                axes.plot([bar.start_s, bar.end_s], [y + 0.46] * 2, color=INK, lw=0.8, solid_capstyle="butt")
            else:
                style = "//" if bar.kind == "hold" else ".."
                axes.barh(y, width, left=bar.start_s, height=0.9, color="none", edgecolor=FAINT, hatch=style, lw=0.4)
        axes.set_yticks(ticks, labels, fontsize=7)
        axes.set_ylim(at - 0.2, -0.8)
        axes.set_xlim(0.0, end_s)
        axes.set_xlabel("seconds")
        axes.grid(visible=False, axis="y")
        left_out = len(bars) - len(chosen)
        axes.set_title(title + (f"  ({left_out:,} later bars not shown)" if left_out and until_s is None else ""))
    return figure
