"""Pictures of results in the house style: load runs, comparisons, convoys, sweeps with their knees, clusters over time.

The house look is Okabe-Ito colours (safe for colour-blind readers), few lines, text large enough at README width.
Figures are made without a global state of matplotlib; `save` writes them as PNG, SVG or PDF.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import ConfigError
from headway.core.files import check_outputs
from headway.policy.placement.contract import ClusterInstance
from headway.sim.cluster.state import GanttBar
from headway.sim.report.tables import duration, tick, tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
INK = "#222222"
FAINT = "#8a8a8a"
BAND = "#e9e9ec"
WIDTH_IN = 9.0

_RC: dict[str, Any] = {
    "font.size": 11,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "svg.hashsalt": "headway",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the house style to figures made inside; matplotlib's settings are restored afterwards."""
    import matplotlib as mpl

    with mpl.rc_context(_RC):  # type: ignore[arg-type]
        yield


def new_figure(height_in: float) -> Figure:
    """Return an empty figure of README width, without pyplot's global state (nothing to close, safe in threads)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_picture(file: Path | None) -> list[Path]:
    """Return the files that `save` writes for a name; their folders are made. None: none.

    Called before the work whose picture it is. Raises ConfigError where it cannot be drawn or written.
    """
    if file is None:
        return []
    if find_spec("matplotlib") is None:
        raise ConfigError(f"cannot draw {file}: there is no matplotlib here; pip install 'headway[plot]'")
    if file.suffix.lower() not in ("", ".png", ".svg", ".pdf"):
        raise ConfigError(f"cannot draw {file}: its name must end in .png, .svg or .pdf, or have no suffix (both)")
    files = [file] if file.suffix else [file.with_suffix(".png"), file.with_suffix(".svg")]
    check_outputs(*files)
    return files


def save(figure: Figure, file: Path) -> list[Path]:
    """Write a figure as `.png`, `.svg` or `.pdf`, or as the first two where the name has no suffix.

    Returns the files written. Raises ConfigError as `check_picture` does.
    """
    files = check_picture(file)
    with house_style():
        for target in files:
            metadata = {"Date": None} if target.suffix.lower() == ".svg" else None
            figure.savefig(target, metadata=metadata)
    return files


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
            title = titles[index] if titles else _convoy_title(run)
            _convoy_panel(axes, run, index, title, data["plan"]["long_tokens"])
        panels[0].set_ylabel("a short's time to first token")
        for axes in panels:
            axes.set_xlabel("short sent, seconds after the long prompt")
        _convoy_limits(panels[0], runs)
    return figure


def _convoy_title(run: Mapping[str, Any]) -> str:
    chunking = {"whole": "whole prompts", "adaptive": "adaptive chunks"}.get(run["chunking"], str(run["chunking"]))
    return f"{str(run['policy']).upper()}, {chunking}"


def _convoy_points(run: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    rows = [row for convoy in run["convoys"] for row in convoy["series"] if row["ttft_s"] is not None]
    return [row["t_s"] for row in rows], [row["ttft_s"] for row in rows]


def _convoy_panel(axes: Axes, run: Mapping[str, Any], index: int, title: str, long_tokens: int) -> None:
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    long_s, median = run["long"]["ttft_s"]["p50"], run["short"]["ttft_s"]["p50"]
    axes.axvspan(0, long_s, color=BAND, zorder=0, lw=0)
    words = f"long prompt ({tokens(long_tokens)}) being read: {duration(long_s)}"
    axes.text(0.02, 0.975, words, transform=axes.transAxes, fontsize=9, va="top", color=INK)
    sent, waits = _convoy_points(run)
    axes.plot(sent, waits, marker, color=colour, markersize=6.5, markeredgecolor="white", markeredgewidth=0.6, zorder=4)
    if median is not None:
        axes.axhline(median, color=colour, lw=1.4, ls=(0, (4, 2)))
        bold: dict[str, Any] = {"fontsize": 13, "fontweight": "bold", "va": "top", "color": colour}
        axes.text(0.02, 0.91, f"median wait {duration(median)}", transform=axes.transAxes, **bold)
    axes.set_title(title, fontweight="bold")


def _convoy_limits(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    waits = [wait for run in runs for wait in _convoy_points(run)[1] if wait > 0]
    axes.set_yscale("log")
    if waits:
        axes.set_ylim(min(waits) / 2, max(waits) * 9)
    axes.set_xlim(0, max(run["long"]["ttft_s"]["p50"] for run in runs) * 1.08)
    seconds_axis(axes, "y")


MOST_BARS = 20_000
"""Most bars in a picture; bars that begin later are left out, and the title has their number."""


def _shown(bars: Sequence[GanttBar], until_s: float | None) -> tuple[list[GanttBar], float]:
    """Return the bars that a picture shows, and the end of its time axis in seconds."""
    chosen = sorted((b for b in bars if until_s is None or b.start_s < until_s), key=lambda b: (b.start_s, b.instance))
    # sorted by start, so the latest bars are dropped
    chosen = chosen[:MOST_BARS]
    end_s = max((bar.end_s for bar in chosen), default=1.0)
    return chosen, min(end_s, until_s) if until_s is not None else end_s


def _request_colours(bars: Sequence[GanttBar]) -> dict[str, str]:
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
    chosen, end_s = _shown(bars, until_s)
    colour = _request_colours(chosen)
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
