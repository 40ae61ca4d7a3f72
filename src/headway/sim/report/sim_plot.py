"""A sweep as a picture: TTFT and worst gap over a swept field, a line a class (and value of a second field).

Over the load (`workload.qps`) these are capacity curves, and the knee of each one's TTFT is marked, with the loads
between which it lies, where a monotone fit supports it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.sim.report.knee import TIMES, supported_knee
from headway.sim.report.load_plot import seconds_axis
from headway.sim.report.style import COLOURS, MARKERS, house_style, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOAD = "workload.qps"
PANELS = (("ttft_s", "p50", "TTFT, median"), ("ttft_s", "p99", "TTFT, P99"), ("max_tbt_s", "p99", "worst gap, P99"))


def sweep_figure(data: Mapping[str, Any]) -> Figure:
    """Three panels over a swept number, the load before others. Points that do not fit are left out; several seeds
    draw intervals."""
    at = data["points"][0]["at"]
    numbers = [name for name, value in at.items() if isinstance(value, int | float)]
    field = LOAD if LOAD in numbers else next(iter(numbers or at))
    with house_style():
        figure = new_figure(height_in=3.6)
        panels = figure.subplots(1, len(PANELS))
        for axes, (metric, cut, title) in zip(panels, PANELS, strict=True):
            for index, (label, line) in enumerate(_lines(data, field, metric, cut).items()):
                _draw(axes, index, label, line)
                if field == LOAD and metric == "ttft_s":
                    _mark_knee(axes, index, line)
            axes.set_title(title, fontweight="bold", fontsize=11)
            axes.set_xlabel(field)
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, high / 30), high * 1.3)
            seconds_axis(axes, "y")
        handles, labels = panels[0].get_legend_handles_labels()
        if len(labels) > 1:
            figure.legend(handles, labels, loc="outside lower center", ncols=4, handlelength=2.4)
    return figure


def _mark_knee(axes: Axes, index: int, line: list[tuple[float, float, float]]) -> None:
    """Mark the knee, where the points support one: where the curve exceeds `TIMES` its value at the lowest load."""
    found = supported_knee(line)
    # the curve stays below the limit within the sweep, or is too noisy
    if found is None:
        return
    colour = COLOURS[index % len(COLOURS)]
    axes.axvline(found.load, color=colour, lw=1.0, ls=":")
    if math.isfinite(found.high):
        axes.axvspan(found.low, found.high, color=colour, alpha=0.08, lw=0)
    between = f"{found.low:.3g} to {found.high:.3g}" if math.isfinite(found.high) else f"above {found.low:.3g}"
    loads = [load for load, _, _ in line]
    # on the side of the line that has more room
    left = found.load > (min(loads) + max(loads)) / 2
    axes.annotate(
        f"{TIMES:g}× at {found.load:.3g}/s ({between})",
        (found.load, 0.02 + 0.06 * (index % 6)),
        xycoords=("data", "axes fraction"),
        xytext=(-3 if left else 3, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        color=colour,
        fontsize=8,
        va="bottom",
        bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.5},
    )


def _lines(data: Mapping[str, Any], field: str, metric: str, cut: str) -> dict[str, list[tuple[Any, float, float]]]:
    lines: dict[str, list[tuple[Any, float, float]]] = {}
    for point in data["points"]:
        if not point["feasible"]:
            continue
        others = ", ".join(f"{value}" for name, value in point["at"].items() if name != field)
        for index, block in enumerate(point["mean"]["classes"]):
            value = block[metric][cut]
            half = point["ci95"]["classes"][index][metric][cut] if point["ci95"] else 0.0
            label = " · ".join(word for word in (block["class"], others) if word) or "all"
            if value:
                lines.setdefault(label, []).append((point["at"][field], value, half or 0.0))
    return lines


def _draw(axes: Axes, index: int, label: str, line: list[tuple[Any, float, float]]) -> None:
    x, y, half = zip(*line, strict=True)
    # Between words there is nothing to join by a line, and long ones need room.
    words = isinstance(x[0], str)
    if words:
        axes.tick_params(axis="x", labelrotation=25)
    low = [min(h, 0.9 * v) for v, h in zip(y, half, strict=True)]
    axes.errorbar(
        x,
        y,
        yerr=[low, list(half)],
        marker=MARKERS[index % len(MARKERS)],
        color=COLOURS[index % len(COLOURS)],
        markersize=6 if words else 4,
        lw=0.0 if words else 1.6,
        elinewidth=1.6,
        capsize=2,
        label=label,
    )
