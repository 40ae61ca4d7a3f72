"""One HTML page of a result: the sentence, the tables, charts. It opens from a file, without a server or a network.

The tables are those of the terminal; charts are drawn by the library of the live page. `write_page` makes the file, the
functions below it make charts of what commands measure.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway import __version__
from headway.core.files import write_output
from headway.sim.metrics import RequestRecord, ttft_s
from headway.sim.report.plots import line_colours

MOST_POINTS = 1_500
"""Points of a line in a page. Of more, only the lowest and the highest of each few neighbours are drawn."""


@dataclass(frozen=True, kw_only=True)
class ReportChart:
    """One chart: axes and named lines."""

    title: str
    x: str
    y: str = ""
    lines: Mapping[str, Sequence[tuple[Any, float]]]
    """Label → points. Where an x is a word, words stand along the axis, in the order in which they come."""
    unit: Literal["seconds", "share", "number"] = "number"
    """What y values are. Shares are from 0 to 1."""
    dots: bool = False
    """Points are not joined."""
    log_x: bool = False
    log_y: bool = False
    note: str = ""


def write_page(file: Path, title: str, shown: Sequence[RenderableType], charts: Sequence[ReportChart]) -> None:
    """Write the page. shown: what the terminal shows, a sentence first. Raises ConfigError as `write_output`."""
    static, template = files("headway") / "serving" / "live" / "static", files("headway") / "sim" / "report"
    read = {
        name: (static / name).read_text() for name in ("uPlot.iife.min.js", "format.js", "uPlot.min.css", "style.css")
    }
    page = (template / "page.html").read_text()
    script = "\n".join(
        (
            read["uPlot.iife.min.js"],
            read["format.js"].replace("export const", "const"),
            (template / "page.js").read_text(),
        )
    )
    data = {"charts": [_drawn(chart) for chart in charts]}
    parts = {
        "title": escape(title),
        "version": __version__,
        "style": read["uPlot.min.css"] + read["style.css"],
        "body": "\n".join(html for thing in shown for html in _html(thing)),
        # In a script element only this character could end it.
        "data": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        "script": script,
        # No other script runs, whatever a name in the data says.
        "hash": b64encode(sha256(script.encode()).digest()).decode(),
    }
    # One pass over the template: a name in braces within the inserted text stays as it is.
    write_output(file, re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page).encode())


def _html(thing: RenderableType) -> Iterator[str]:
    """Yield the HTML of text, of tables, and of groups of both."""
    if isinstance(thing, Group):
        for each in thing.renderables:
            yield from _html(each)
    elif isinstance(thing, Table):
        head = "".join(f"<th{_side(column.justify)}>{_text(column.header)}</th>" for column in thing.columns)
        rows = zip(*(list(column.cells) for column in thing.columns), strict=True)
        sides = [_side(column.justify) for column in thing.columns]
        cells = (
            "".join(f"<td{side}>{_text(cell)}</td>" for side, cell in zip(sides, row, strict=True)) for row in rows
        )
        caption = f"<caption>{_text(thing.title)}</caption>" if thing.title else ""
        body = "\n".join(f"<tr>{row}</tr>" for row in cells)
        table = f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
        yield f'<div class="card scroll">{table}</div>'
    elif text := _text(thing):
        yield f"<p>{text}</p>"


def _text(thing: Any) -> str:
    plain = thing.plain if isinstance(thing, Text) else Text.from_markup(str(thing)).plain
    return escape(plain.strip())


def _side(justify: str) -> str:
    return ' class="right"' if justify == "right" else ""


def _drawn(chart: ReportChart) -> dict[str, Any]:
    """Return a chart as its script takes it: numbers only, few enough."""
    words = list(dict.fromkeys(x for line in chart.lines.values() for x, _ in line if isinstance(x, str)))
    lines = {}
    for name, line in chart.lines.items():
        points = [(words.index(str(x)) if words else float(x), float(y)) for x, y in line]
        # A logarithmic axis has no place for what is not above 0.
        points = [
            p for p in points if math.isfinite(p[1]) and (p[0] > 0 or not chart.log_x) and (p[1] > 0 or not chart.log_y)
        ]
        lines[name] = [[float(f"{x:.6g}"), float(f"{y:.4g}")] for x, y in _thinned(sorted(points))]
    return {**asdict(replace(chart, lines={})), "words": words, "lines": lines, "colours": line_colours([*lines])}


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    step = 1 if len(points) <= MOST_POINTS else math.ceil(2 * len(points) / MOST_POINTS)
    parts = [points[start : start + step] for start in range(0, len(points), step)]
    ends = [(min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])) for part in parts]
    return [point for pair in ends for point in dict.fromkeys(pair)] if step > 1 else list(points)


def request_charts(records: Sequence[RequestRecord]) -> list[ReportChart]:
    """Return the times to first token by arrival and by length of the prompt, a colour a class."""
    came = [(record, wait) for record in records if (wait := ttft_s(record)) is not None]
    names = sorted({record.klass for record, _ in came})

    def chart(title: str, x: str, field: str, log_x: bool) -> ReportChart:
        lines = {n or "all": [(getattr(r, field), wait) for r, wait in came if r.klass == n] for n in names}
        return ReportChart(title=title, x=x, lines=lines, unit="seconds", dots=True, log_x=log_x, log_y=True)

    return [
        chart("Time to first token, by arrival", "arrival, seconds", "arrival_s", False),
        chart("Time to first token, by length of the prompt", "prompt, tokens", "prompt_tokens", True),
    ]


LOAD = "workload.qps"


def sweep_charts(data: Mapping[str, Any], asked: Collection[str]) -> list[ReportChart]:
    """Return the shares in their SLO (of the classes `asked`) and the P99 of TTFT, over what a result's points vary:
    the load, else the first field with numbers, else the first."""
    at = data["points"][0]["at"]
    numbers = [name for name, value in at.items() if isinstance(value, int | float)]
    field = LOAD if LOAD in numbers else next(iter(numbers or at))
    shares = _sweep_lines(data, field, lambda block: block["good_share"] if block["class"] in asked else None)
    waits = _sweep_lines(data, field, lambda block: block["ttft_s"]["p99"])
    knees = [
        f"{name}: {TIMES:g} times its first value at {found:.3g}/s"
        for name, line in waits.items()
        if field == LOAD and (found := supported_knee(line)) is not None
    ]
    words = any(isinstance(x, str) for line in waits.values() for x, _ in line)
    charts = [
        ReportChart(title="Share of requests in their SLO", x=field, lines=shares, unit="share", dots=words),
        ReportChart(title="Time to first token, P99", x=field, lines=waits, unit="seconds", dots=words, log_y=True,
              note="; ".join(knees)),
    ]  # fmt: skip
    return charts if shares else charts[1:]


def _sweep_lines(
    data: Mapping[str, Any], field: str, value: Callable[[Mapping[str, Any]], float | None]
) -> dict[str, list[tuple[Any, float]]]:
    """Return (x, value) of each point that has one, by class and other swept fields."""
    lines: dict[str, list[tuple[Any, float]]] = {}
    for point in data["points"]:
        if not point["feasible"]:
            continue
        others = ", ".join(f"{words}" for name, words in point["at"].items() if name != field)
        for block in point["mean"]["classes"]:
            label = " · ".join(word for word in (block["class"], others) if word) or "all"
            if (found := value(block)) is not None:
                lines.setdefault(label, []).append((point["at"][field], found))
    return lines


TIMES = 5.0
"""Latency at the knee over that of the lowest load. Tetris normalises to 25 times; there the curve is past its knee
already, and depends on how long a run is."""
TRUST = 1.5
"""Factor by which a point may lie off the monotone fit. Beyond it the curve is noise around a knee, not a knee."""


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


def supported_knee(line: Sequence[tuple[float, float]]) -> float | None:
    """Return the knee of (load, latency) points, where a monotone fit of the latencies' logarithms supports one.

    None where there is no knee, and where a point lies off the fit by more than the factor `TRUST`: a latency cannot
    fall as load rises, so that such a curve is too noisy to have one.
    """
    points = sorted(line)
    if len(points) < 2 or any(latency <= 0 for _, latency in points):
        return None
    logs = [math.log(latency) for _, latency in points]
    fit = monotone(logs)
    if max(abs(one - other) for one, other in zip(logs, fit, strict=True)) > math.log(TRUST):
        return None
    return knee([(load, math.exp(value)) for (load, _), value in zip(points, fit, strict=True)])


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


def convoy_charts(data: Mapping[str, Any]) -> list[ReportChart]:
    """Return what shorts waited beside the long prompt, of a convoy's JSON, a colour a server or policy."""
    lines = {
        run["policy"]: [
            (row["t_s"], row["ttft_s"]) for one in run["convoys"] for row in one["series"] if row["ttft_s"] is not None
        ]
        for run in data["runs"]
    }
    title = "Time to first token of short prompts"
    x = "sent, seconds after the long prompt"
    return [ReportChart(title=title, x=x, lines=lines, unit="seconds", dots=True, log_y=True)]
