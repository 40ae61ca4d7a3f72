"""Pictures of results in the house style: load runs, comparisons, convoys, sweeps with their knees, clusters over time.

The house look is Okabe-Ito colours (safe for colour-blind readers), few lines, text large enough at README width.
Figures are made without a global state of matplotlib; `save` writes them as PNG, SVG or PDF.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headway.core.errors import ConfigError
from headway.core.files import check_outputs
from headway.policy.placement.contract import ClusterInstance
from headway.sim.cluster.state import GanttBar
from headway.sim.metrics import RequestRecord, ttft_s
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


def compare_figure(runs: Mapping[str, Sequence[RequestRecord]], klass: str | None = None) -> Figure:
    """CDFs of TTFT and of JCT (arrival to last token), a line a run; of one class, or of all requests. Requests that
    have not come so far do not count, so a line's end says less the more of them there are."""
    with house_style():
        figure = new_figure(height_in=3.6)
        first, whole = figure.subplots(1, 2)
        chosen = {name: [r for r in records if klass in (None, r.klass)] for name, records in runs.items()}
        waits = {name: [s for r in mine if (s := ttft_s(r)) is not None] for name, mine in chosen.items()}
        ends = {
            name: [r.finish_s - r.arrival_s for r in mine if r.finish_s is not None] for name, mine in chosen.items()
        }
        of = f", {klass}" if klass else ""
        draw_cdf(first, waits, f"time to first token{of}")
        draw_cdf(whole, ends, f"job completion time{of}")
        for axes in (first, whole):
            axes.tick_params(axis="x", labelsize=9)
        whole.legend(loc="lower right", handlelength=2.4)
    return figure


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


TIMES = 5.0
"""Tetris normalises to 25 times; there the curve is past its knee already, and depends on how long a run is."""


TRUST = 1.5
"""Factor by which a point may lie off the monotone fit. Beyond it the curve is noise around a knee, not a knee."""


class SupportedKnee(NamedTuple):
    """The knee of a curve that a monotone fit describes, and the loads between which it lies."""

    load: float
    low: float
    """The highest load up to which every point, at its upper bound, is within the limit."""
    high: float
    """The lowest load from which on every point, at its lower bound, is above it; infinite: the last point may not
    be."""


def monotone(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to the values in least squares (pooling of adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        # A pool below the one before it is merged with it, at their common mean.
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, n), (second, m) = pools[-2:]
            pools[-2:] = [((first * n + second * m) / (n + m), n + m)]
    return [value for value, count in pools for _ in range(count)]


def supported_knee(line: Sequence[tuple[float, float, float]], times: float = TIMES) -> SupportedKnee | None:
    """Return the knee of (load, latency, half of its interval) points, where a monotone fit supports one.

    The fit is of the latencies' logarithms. None where there is no knee, and where a point lies off the fit by more
    than the factor `TRUST`: a latency cannot fall as load rises, so that such a curve is too noisy to have one.
    """
    points = sorted(line)
    if len(points) < 2 or any(latency <= 0 for _, latency, _ in points):
        return None
    logs = [math.log(latency) for _, latency, _ in points]
    fit = monotone(logs)
    if max(abs(one - other) for one, other in zip(logs, fit, strict=True)) > math.log(TRUST):
        return None
    loads = [load for load, _, _ in points]
    at = knee([(load, math.exp(value)) for load, value in zip(loads, fit, strict=True)], times)
    if at is None:
        return None
    limit = times * math.exp(fit[0])
    # The points themselves, with their intervals, say between which loads the limit is passed.
    below = [load for load, latency, half in points if latency + half <= limit]
    above = [load for load, latency, half in points if latency - half <= limit]
    first_over = next((load for load, latency, half in points if latency + half > limit), math.inf)
    low = max((load for load in below if load < first_over), default=loads[0])
    high = min((load for load in loads if load > max(above, default=-math.inf)), default=math.inf)
    return SupportedKnee(at, min(low, at), max(high, at))


def knee(line: Sequence[tuple[float, float]], times: float = TIMES) -> float | None:
    """Return the load at which latency first exceeds `times` that of the lowest load.

    line: (load, latency), in any order. Between two points the latency's logarithm is taken as linear. None when the
    limit is never exceeded, with fewer than two points, or when the lowest load's latency is not above 0.
    """
    points = sorted(line)
    if len(points) < 2 or points[0][1] <= 0:
        return None
    limit = times * points[0][1]
    for (low, below), (high, above) in pairwise(points):
        if above > limit:
            below = max(below, 1e-12)
            return low + (high - low) * math.log(limit / below) / math.log(above / below)
    return None


LOAD = "workload.qps"
PANELS = (("ttft_s", "p50", "TTFT, median"), ("ttft_s", "p99", "TTFT, P99"), ("max_tbt_s", "p99", "worst gap, P99"))


def sweep_field(data: Mapping[str, Any]) -> str:
    """Return what a result's points are drawn over: the load, else the first field with numbers, else the first."""
    at = data["points"][0]["at"]
    numbers = [name for name, value in at.items() if isinstance(value, int | float)]
    return LOAD if LOAD in numbers else next(iter(numbers or at))


def sweep_figure(data: Mapping[str, Any]) -> Figure:
    """Three panels over a swept number, the load before others. Points that do not fit are left out; several seeds
    draw intervals."""
    field = sweep_field(data)
    with house_style():
        figure = new_figure(height_in=3.6)
        panels = figure.subplots(1, len(PANELS))
        for axes, (metric, cut, title) in zip(panels, PANELS, strict=True):
            lines = sweep_lines(data, field, partial(_percentile, metric, cut))
            for index, (label, line) in enumerate(lines.items()):
                _sweep_line(axes, index, label, line)
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


def _percentile(metric: str, cut: str, block: Mapping[str, Any]) -> float | None:
    # A logarithmic axis has no place for 0.
    return block[metric][cut] or None


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


def sweep_lines(
    data: Mapping[str, Any], field: str, value: Callable[[Mapping[str, Any]], float | None]
) -> dict[str, list[tuple[Any, float, float]]]:
    """Return (x, value, half of its interval) of each point, by class and other swept fields. Points without a value
    are left out."""
    lines: dict[str, list[tuple[Any, float, float]]] = {}
    for point in data["points"]:
        if not point["feasible"]:
            continue
        others = ", ".join(f"{words}" for name, words in point["at"].items() if name != field)
        for index, block in enumerate(point["mean"]["classes"]):
            half = value(point["ci95"]["classes"][index]) if point["ci95"] else None
            label = " · ".join(word for word in (block["class"], others) if word) or "all"
            if (found := value(block)) is not None:
                lines.setdefault(label, []).append((point["at"][field], found, half or 0.0))
    return lines


def _sweep_line(axes: Axes, index: int, label: str, line: list[tuple[Any, float, float]]) -> None:
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
