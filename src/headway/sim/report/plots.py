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
WIDTH_IN = 7.6

_RC: dict[str, Any] = {
    "font.size": 12,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 14,
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


OURS = ("ladder", "headway", "plugged")
"""Words that name Headway in a label. What they name has the first colour, which nothing else has."""

PROPOSED = ("medha", "spp", "tetris", "pecsched")


def is_ours(label: str) -> bool:
    """Return whether a line's label names Headway."""
    return any(word in label.lower() for word in OURS)


def line_colours(labels: Sequence[str]) -> list[str]:
    """Return a colour for each line: the accent for Headway's first, the others' for the rest.

    Where no label names Headway, what a paper proposes has the accent, else the first line.
    """
    papers = (at for at, label in enumerate(labels) if label.lower() in PROPOSED)
    mine = next((at for at, label in enumerate(labels) if is_ours(label)), next(papers, 0))
    others = (COLOURS[1 + at % (len(COLOURS) - 1)] for at in range(len(labels)))
    return [COLOURS[0] if at == mine else next(others) for at in range(len(labels))]


def label_lines(axes: Axes, ends: Sequence[tuple[float, str, str]], height_in: float) -> None:
    """Write labels right of the axes, each at its line's end, apart from each other.

    ends: value on the y axis, words, colour. height_in: about the height of the axes, inches. Called when the axes have
    their limits.
    """
    size = float(_RC["font.size"])
    low, high = axes.get_ylim()
    scale = math.log if axes.get_yscale() == "log" else float
    span = scale(high) - scale(low)
    places = sorted(((scale(y) - scale(low)) / span, words.count("\n") + 1, words, colour) for y, words, colour in ends)
    line = 1.3 * size / 72.0 / height_in
    centres: list[float] = []
    above = -math.inf
    for at, lines, _, _ in places:
        centres.append(max(at, above + lines * line / 2))
        above = centres[-1] + lines * line / 2
    # A label above the axes moves all labels below it down.
    below = max(1.0, places[-1][0]) if places else 1.0
    for index in range(len(centres) - 1, -1, -1):
        half = places[index][1] * line / 2
        centres[index] = min(centres[index], below - half if index < len(centres) - 1 else below)
        below = centres[index] - half
    for (_, _, words, colour), centre in zip(places, centres, strict=True):
        axes.annotate(
            words, (1.015, centre), xycoords="axes fraction", va="center", color=colour, annotation_clip=False
        )


def convoy_figure(data: Mapping[str, Any], names: Mapping[str, str] | None = None, about: str = "") -> Figure:
    """Draw all runs of a convoy's JSON on one axis, each with its name, median and the long prompt's time beside it.

    x: the time at which a short request was sent; y: its TTFT (log). names: of policies, where their own do not do.
    about: what ran it, below the axis.
    """
    runs = sorted(data["runs"], key=lambda run: run["short"]["ttft_s"]["p50"] or 0.0)
    labels = [(names or {}).get(run["policy"], str(run["policy"])) for run in runs]
    # The slowest has the colour most unlike Headway's.
    colours = line_colours(labels[::-1])[::-1]
    size = 6.5 if max((len(_convoy_points(run)[0]) for run in runs), default=0) <= 60 else 4.0
    with house_style():
        figure = new_figure(height_in=4.6)
        axes = figure.subplots()
        ends = []
        for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
            sent, waits = _convoy_points(run)
            colour, look = colours[index], MARKERS[index % len(MARKERS)]
            axes.plot(sent, waits, look, color=colour, markersize=size, markeredgecolor="white", markeredgewidth=0.4)
            median, long_s = run["short"]["ttft_s"]["p50"], run["long"]["ttft_s"]["p50"]
            if median is not None:
                axes.plot([0, long_s], [median] * 2, color=colour, lw=1.6, zorder=1)
                words = f"{label}\nmedian {duration(median)}\ndocument {duration(long_s)}"
                ends.append((median, words, colour))
        axes.set_xlabel("chat sent, seconds after the document" + (f"\n{about}" if about else ""))
        _convoy_limits(axes, runs)
        axes.set_ylabel("a chat's time to first token")
        label_lines(axes, ends, 3.2)
        _convoy_ratio(axes, runs, labels)
        axes.set_title(_convoy_title(data, runs, labels), fontweight="bold")
    return figure


def _place_of_ours(labels: Sequence[str]) -> int:
    """Return which label names Headway; 0: none does."""
    return next((at for at, label in enumerate(labels) if is_ours(label)), 0)


def _convoy_title(data: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    """Return what was found: medians of Headway and of the slowest, else of the first and last."""
    beside = f"beside a {tokens(data['plan']['long_tokens'])}-token document"
    medians = [run["short"]["ttft_s"]["p50"] for run in runs]
    mine = _place_of_ours(labels)
    if not medians or None in medians or mine == len(runs) - 1:
        return f"Chats' time to first token {beside}"
    return f"A chat waits {duration(medians[mine])} {beside},\nnot {duration(medians[-1])}"


def _convoy_ratio(axes: Axes, runs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> None:
    """Draw how many times shorter Headway's median wait is than the longest, or the shortest where none is Headway."""
    mine = _place_of_ours(labels)
    first, last = (run["short"]["ttft_s"]["p50"] for run in (runs[mine], runs[-1])) if runs else (None, None)
    if not first or not last or mine == len(runs) - 1:
        return
    x = axes.get_xlim()[1] * 0.1
    axes.annotate("", (x, first), (x, last), arrowprops={"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0})
    words = f"{last / first:.0f}× shorter"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 2.0}
    axes.text(1.2 * x, math.sqrt(first * last), words, va="center", fontweight="bold", fontsize=16, bbox=box)


def _convoy_points(run: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    rows = [row for convoy in run["convoys"] for row in convoy["series"] if row["ttft_s"] is not None]
    return [row["t_s"] for row in rows], [row["ttft_s"] for row in rows]


def _convoy_limits(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    waits = [wait for run in runs for wait in _convoy_points(run)[1] if wait > 0]
    axes.set_yscale("log")
    if waits:
        axes.set_ylim(min(waits) / 2, max(waits) * 2)
    axes.set_xlim(0, max((run["long"]["ttft_s"]["p50"] for run in runs), default=1.0))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
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


DECODE, EMPTY = "#c3ced8", "#ffffff"
OUTLINED = {"hold": ("reserved", "///"), "pause": ("paused", "xxxx")}
"""Kinds of bars without a class, each with its name in the legend and its hatching."""


def _bar_looks(bars: Sequence[GanttBar], classes: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return how bars of each name in the legend are drawn, in the legend's order."""
    names = sorted({_bar_name(bar, classes) for bar in bars if bar.kind in ("span", "batch") and bar.request})
    # Blue, orange and green before red and purple: they differ most beside the grey of decodes.
    order = (0, 4, 2, 1, 3, 5)
    looks: dict[str, dict[str, Any]] = {
        name: {"facecolor": COLOURS[order[at % len(order)]], "edgecolor": "white", "lw": 0.3}
        for at, name in enumerate(names)
    }
    if any(bar.kind == "batch" and not bar.request for bar in bars):
        looks["decode"] = {"facecolor": DECODE, "edgecolor": DECODE, "lw": 0.3}
    for kind, (name, hatch) in OUTLINED.items():
        if any(bar.kind == kind for bar in bars):
            looks[name] = {"facecolor": EMPTY, "edgecolor": INK, "hatch": hatch, "lw": 0.4}
    return looks


SHADES = (0.0, 0.35, 0.6)
"""How much white the colour of each third prompt has."""


def _lighter(colour: str, white: float) -> tuple[float, ...]:
    """Return a colour with so much white in it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(part + (1.0 - part) * white for part in parts)


def _bar_name(bar: GanttBar, classes: Mapping[str, str]) -> str:
    """Return what the legend calls a bar: the class of its prompt, or what it is."""
    if bar.kind in OUTLINED:
        return OUTLINED[bar.kind][0]
    return (classes.get(bar.request) or "prompt") if bar.request else "decode"


def gantt_figure(
    bars: Sequence[GanttBar],
    instances: Sequence[ClusterInstance],
    title: str = "",
    until_s: float | None = None,
    classes: Mapping[str, str] | None = None,
) -> Figure:
    """Draw one row for each instance, nodes apart.

    Prompts have the colour of their request's class (`classes`), whether they run as spans or in batches; batches that
    only decode are grey; reservations and pauses are hatched; transfers are thin lines under their sender.
    """
    from matplotlib.patches import Patch

    chosen, end_s = _shown(bars, until_s)
    looks = _bar_looks(chosen, classes or {})
    # Neighbours of one class differ a little, so that it is seen which instances compute one prompt.
    prompts = dict.fromkeys(bar.request for bar in chosen if bar.kind == "span")
    shades = {name: SHADES[at % len(SHADES)] for at, name in enumerate(prompts)}
    rows, ticks, labels = {}, [], []
    at, node = 0.0, instances[0].node if instances else 0
    for instance in instances:
        at += 0.4 if instance.node != node else 0.0
        node = instance.node
        rows[instance.id] = at
        ticks.append(at)
        labels.append(f"{instance.role} {instance.id}")
        at += 1.0
    with house_style():
        figure = new_figure(height_in=min(12.0, 1.5 + 0.27 * at))
        axes = figure.subplots()
        # Hatched bars are drawn over the others.
        for bar in sorted(chosen, key=lambda one: one.kind in OUTLINED):
            y, width = rows[bar.instance], bar.end_s - bar.start_s
            if bar.kind == "transfer":
                axes.plot([bar.start_s, bar.end_s], [y + 0.46] * 2, color=INK, lw=0.8, solid_capstyle="butt")
            else:
                look = looks[_bar_name(bar, classes or {})]
                if bar.request in shades and bar.kind not in OUTLINED:
                    look = {**look, "facecolor": _lighter(look["facecolor"], shades[bar.request])}
                axes.barh(y, width, left=bar.start_s, height=0.82, **look)
        axes.set_yticks(ticks, labels, fontsize=10)
        axes.set_ylim(at - 0.2, -0.8)
        axes.set_xlim(0.0, end_s)
        axes.set_xlabel("seconds")
        axes.grid(visible=False, axis="y")
        left_out = len(bars) - len(chosen)
        more = f"  ({left_out:,} later bars not shown)" if left_out and until_s is None else ""
        axes.set_title(title + more, fontweight="bold")
        shown: list[Any] = [Patch(label=name, **look) for name, look in looks.items()]
        if any(bar.kind == "transfer" for bar in chosen):
            shown.append(_line_of("KV moves"))
        if shown:
            figure.legend(handles=shown, loc="outside lower center", ncols=len(shown))
    return figure


def _line_of(label: str) -> Any:
    """Return a thin line for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=INK, lw=1.2, label=label)
