"""Picture of a convoy run: short requests' TTFT by the time they were sent, and the long prompt's prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headway.sim.report.style import BAND, COLOURS, INK, MARKERS, house_style, new_figure
from headway.sim.report.tables import duration, tick, tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def convoy_figure(data: Mapping[str, Any], titles: Sequence[str] | None = None) -> Figure:
    """Draw one panel for each run of the convoy's JSON, with common axes. `titles` replace the panels' own.

    x: the time at which a short request was sent; y: its TTFT (log); a band during the long prompt's prefill; a line at
    the median.
    """
    runs = data["runs"]
    with house_style():
        figure = new_figure(height_in=4.3)
        panels = figure.subplots(1, len(runs), sharex=True, sharey=True, squeeze=False)[0]
        for index, (run, axes) in enumerate(zip(runs, panels, strict=True)):
            _panel(
                axes,
                run,
                index,
                titles[index] if titles else _title(run),
                data["plan"]["long_tokens"],
            )
        panels[0].set_ylabel("a short's time to first token")
        for axes in panels:
            axes.set_xlabel("short sent, seconds after the long prompt")
        _limits(panels[0], runs)
    return figure


def _title(run: Mapping[str, Any]) -> str:
    chunking = {"whole": "whole prompts", "adaptive": "adaptive chunks"}.get(run["chunking"], str(run["chunking"]))
    return f"{str(run['policy']).upper()}, {chunking}"


def _points(run: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    rows = [row for convoy in run["convoys"] for row in convoy["series"] if row["ttft_s"] is not None]
    return [row["t_s"] for row in rows], [row["ttft_s"] for row in rows]


def _panel(axes: Axes, run: Mapping[str, Any], index: int, title: str, long_tokens: int) -> None:
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    long_s, median = run["long"]["ttft_s"]["p50"], run["short"]["ttft_s"]["p50"]
    axes.axvspan(0, long_s, color=BAND, zorder=0, lw=0)
    axes.text(
        0.02,
        0.975,
        f"long prompt ({tokens(long_tokens)}) being read: {duration(long_s)}",
        transform=axes.transAxes,
        fontsize=9,
        va="top",
        color=INK,
    )
    sent, waits = _points(run)
    axes.plot(
        sent,
        waits,
        marker,
        color=colour,
        markersize=6.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        zorder=4,
    )
    if median is not None:
        axes.axhline(median, color=colour, lw=1.4, ls=(0, (4, 2)))
        axes.text(
            0.02,
            0.91,
            f"median wait {duration(median)}",
            transform=axes.transAxes,
            fontsize=13,
            fontweight="bold",
            va="top",
            color=colour,
        )
    axes.set_title(title, fontweight="bold")


def _limits(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    waits = [wait for run in runs for wait in _points(run)[1] if wait > 0]
    axes.set_yscale("log")
    if waits:
        axes.set_ylim(min(waits) / 2, max(waits) * 9)
    axes.set_xlim(0, max(run["long"]["ttft_s"]["p50"] for run in runs) * 1.08)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
