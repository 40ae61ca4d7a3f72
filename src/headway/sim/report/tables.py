"""Terminal tables and CSV of results: simulations, load runs, convoys, calibrations. Progress goes to stderr.

Tables are made from the JSON that the commands write, so that a file shows what the terminal showed.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headway.sim.metrics import (
    RequestRecord,
    RunSummary,
    error_reason,
    request_row,
)


def duration(seconds: float | None) -> str:
    """Format seconds in two to three significant digits: 0.0452 → `45 ms`, 7.91 → `7.9 s`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        ms = seconds * 1000
        return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def tokens(count: float) -> str:
    """Format a count of tokens: 32768 → `32.8K`, 1_000_000 → `1M`, 200 → `200`."""
    if count >= 999_500:
        return f"{count / 1e6:.3g}M"
    return f"{count / 1e3:.3g}K" if count >= 10_000 else f"{count:,.0f}"


def number(value: float | None, digits: int = 1) -> str:
    """Format a plain number; `-` for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def tick(seconds: float) -> str:
    """Format an axis label: `30 ms`, `1 s`, without trailing zeros."""
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"


def say(line: str) -> None:
    """Print a line of progress, with rich's markup, on stderr."""
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


def show(thing: RenderableType) -> None:
    """Print a result on stdout. Text is wrapped at the terminal's width; no table's column is cut."""
    console = Console(highlight=False)
    # Columns of figures are not wrapped: a table that is wider than the terminal is left to the terminal.
    # Where ± becomes +-, a line grows.
    width = console.width if "utf" in console.encoding.lower() else console.width - 4
    Console(highlight=False, width=max(_needed(thing), width)).print(thing)


def _needed(thing: RenderableType) -> int:
    """Return the columns that the widest table needs; text needs none."""
    if isinstance(thing, Group):
        return max(map(_needed, thing.renderables), default=0)
    if not isinstance(thing, Table):
        return 0
    width = Console(width=1000).measure(thing)
    return width.maximum if all(column.no_wrap for column in thing.columns) else width.minimum


METRICS = (
    ("TTFT", "ttft_s"),
    ("TBT", "tbt_s"),
    ("worst TBT", "max_tbt_s"),
    ("normalised", "normalised_latency_s"),
    ("queueing", "queueing_s"),
    ("JCT", "e2e_s"),
)
_WORDS = frozenset(("class", "metric", "reason", "for example", "policy", "server", "predicted by"))
CUTS = ("p1", "p25", "p50", "p75", "p90", "p99", "max")
SPREADS = ("p50", "p99")
SHOWN_CUTS = (("TTFT p50", "ttft_s", "p50"), ("TTFT p99", "ttft_s", "p99"), ("TBT p99", "tbt_s", "p99"),
              ("JCT p50", "e2e_s", "p50"))  # fmt: skip
"""Columns of times where all shall fit 80 columns: label, metric, percentile."""
SWEEP_CUTS = (("TTFT p50", "ttft_s", "p50"), ("p99", "ttft_s", "p99"), ("TBT p50", "tbt_s", "p50"),
              ("p99", "tbt_s", "p99"), ("worst TBT p99", "max_tbt_s", "p99"), ("JCT p50", "e2e_s", "p50"))  # fmt: skip
"""Columns of times of a sweep with `--wide`; a percentile alone is of the metric before."""
MOST_COLUMNS = 8


def simulation_report(data: Mapping[str, Any], wide: bool = False) -> RenderableType:
    """Return the terminal output of a result: a sentence, then the only point in full, or a sweep as a table."""
    points, title, asked = data["points"], data["scenario"].get("name") or "", asked_classes(data)
    if len(points) > 1 or points[0]["at"]:
        faults = [f"✗ {_named(', '.join(map(str, p['at'].values())), p['why'])}" for p in points if not p["feasible"]]
        return Group(sweep_sentence(points, asked), sweep_table(points, title, asked, wide), *map(escape, faults))
    point = points[0]
    if not point["feasible"]:
        return f"{title}: infeasible: {point['why']}"
    mean, ci = point["mean"], point["ci95"]
    named = f"{title}: " if title else ""
    table = classes_table(mean, ci, asked, wide)
    return Group(f"{named}{classes_sentence(mean, asked)}", table, use_lines(point))


def _named(point: str, why: str) -> str:
    """Return a point and why it could not be simulated, without the point's name where the sentence begins with it."""
    return f"{point}: {why.removeprefix(f'{point} ')}"


def asked_classes(data: Mapping[str, Any]) -> set[str]:
    """Return the classes for which a result's scenario asks latencies."""
    asked = {klass for klass, slo in (data["scenario"].get("slo") or {}).items() if any(slo.values())}
    return asked | {name.split(".")[1] for point in data["points"] for name in point["at"] if name.startswith("slo.")}


def classes_sentence(body: Mapping[str, Any], asked: Collection[str]) -> str:
    """Return the first tokens' times by class, and the share of requests that met their SLO where one is asked."""
    waits = [
        f"{block['class'] or 'requests'} {duration(block['ttft_s']['p50'])} (P99 {duration(block['ttft_s']['p99'])})"
        for block in body["classes"]
    ]
    words = f"time to first token, median: {', '.join(waits)}"
    judged = [block for block in body["classes"] if block["class"] in asked]
    share = _good(judged)
    names = " and ".join(block["class"] or "requests" for block in judged)
    return words if share is None else f"{words}; {share:.1%} of {names} in their SLO"


def _good(blocks: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of the classes' requests that were good; None without a request."""
    if len(blocks) == 1:
        return None if blocks[0]["good_share"] is None else float(blocks[0]["good_share"])
    count = sum(block["requests"] for block in blocks)
    return sum(block["good"] for block in blocks) / count if count else None


def classes_table(
    body: Mapping[str, Any], ci: Mapping[str, Any] | None, asked: Collection[str], wide: bool = False
) -> Table:
    """Return latencies by class. wide: a row a metric, and half of the 95% interval over seeds (`ci`)."""
    blocks = body["classes"] if len(body["classes"]) == 1 else [*body["classes"], body["total"]]
    asked = {*asked, *(("all",) if asked else ())}

    def head(block: Mapping[str, Any]) -> list[str]:
        count = f"{number(block['ok'], 0)} of {number(block['requests'], 0)}"
        return [block["class"] or "-", count, _share(block["good_share"]) if block["class"] in asked else "–"]

    if not wide:
        table = _table("", "class", "requests", "good", *(label for label, *_ in SHOWN_CUTS))
        for block in blocks:
            table.add_row(*head(block), *(duration(block[key][cut]) for _, key, cut in SHOWN_CUTS))
        return table
    names = ("class", "requests", "good", "prompt tok", "output tok", "starved", "metric")
    table = _table("", *names, *CUTS, *(f"± {cut}" for cut in SPREADS if ci))
    for block in blocks:
        spread, first = _same(ci, block["class"]), head(block)
        first += [tokens(block["prompt_tokens"]), tokens(block["output_tokens"]), _share(block.get("starved_share"))]
        for index, (label, key) in enumerate(METRICS):
            cells = [duration(block[key][cut]) for cut in CUTS]
            cells += [duration(spread[key][cut]) for cut in SPREADS] if spread else []
            last = index == len(METRICS) - 1
            table.add_row(*(first if index == 0 else [""] * len(first)), label, *cells, end_section=last)
    return table


def use_lines(point: Mapping[str, Any]) -> str:
    """Return rates, utilisation and failures, as lines."""
    mean, use, seeds = point["mean"], point["mean"]["use"], len(point["runs"])
    words = [
        f"{number(mean['request_throughput_rps'], 2)} requests/s, goodput {number(mean['goodput_rps'], 2)}",
        f"{number(mean['output_throughput_tps'])} output tokens/s",
        f"MFU {_share(use['mfu'])}",
        f"MBU {_share(use['mbu'])}",
        f"idle {_share(use['idle_share'])}",
    ]
    more = [
        f"{number(use['preemptions'], 0)} preemptions",
        f"{tokens(use['recomputed_tokens'])} tokens recomputed",
        f"{number(use['unfinished'], 0)} unfinished",
        f"{number(use['starved'], 0)} never scheduled",
    ]
    if use.get("scheduling_share_of_jct") is not None:
        more.append(f"scheduling {100 * use['scheduling_share_of_jct']:.3f}% of JCT")
    failed: Counter[str] = sum((Counter(run["total"]["errors"]) for run in point["runs"]), Counter())
    lines = [" · ".join(words), " · ".join(more)]
    if (cache := use.get("prefix_cache")) is not None:
        lines.append(
            f"prefix cache: {_share(cache['hit_rate'])} of {tokens(cache['queried_tokens'])} prompt tokens cached"
        )
    if failed:
        lines.append("not answered: " + ", ".join(f"{reason} {number(n / seeds, 0)}" for reason, n in failed.items()))
    if seeds > 1:
        lines.append(f"means of {seeds} seeds; with --wide ± half of the 95% confidence interval")
    return "\n".join(lines)


def sweep_sentence(points: Sequence[Mapping[str, Any]], asked: Collection[str]) -> str:
    """Return the best point by what is asked: the share in their SLO, over loads the goodput, else the P99 TTFT."""
    found = [point for point in points if point["feasible"]]
    if not found:
        return f"no point is feasible; the first: {points[0]['why']}"

    def at(point: Mapping[str, Any]) -> str:
        return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in point["at"].items())

    if asked and "workload.qps" in points[0]["at"]:
        best = max(found, key=lambda point: point["mean"]["goodput_rps"] or 0.0)
        return f"highest goodput: {number(best['mean']['goodput_rps'], 2)} requests/s, at {at(best)}"

    def value(point: Mapping[str, Any]) -> float:
        if asked:
            return _good([block for block in point["mean"]["classes"] if block["class"] in asked]) or 0.0
        late = point["mean"]["total"]["ttft_s"]["p99"]
        return -math.inf if late is None else -float(late)

    best, worst = max(found, key=value), min(found, key=value)
    first, last = (f"{value(point):.1%}" if asked else duration(-value(point)) for point in (best, worst))
    what = f"{first} of {' and '.join(sorted(asked))} in their SLO" if asked else f"P99 TTFT of all: {first}"
    if first != last:
        return f"{what} with {at(best)}, {last} with {at(worst)}"
    return f"{what} at each of {len(found)} points" if len(found) > 1 else f"{what} with {at(best)}"


def sweep_table(points: Sequence[Mapping[str, Any]], title: str, asked: Collection[str], wide: bool = False) -> Table:
    """Return one row for each point and class; layouts that do not fit in memory have a row with the reason."""
    fields = list(points[0]["at"])
    short = [field.rpartition(".")[2] for field in fields]
    # "qps" for workload.qps, unless two swept fields end alike; the title has them in full.
    names = short if len(set(short)) == len(short) and "class" not in short else fields
    heading = f"{title}: {' × '.join(fields)}" if title else " × ".join(fields)
    cuts = SWEEP_CUTS if wide else SHOWN_CUTS[: max(1, MOST_COLUMNS - len(fields) - 2)]
    more = ("good", "starved", "unfinished", "MFU") if wide else ("good",)
    table = _table(heading, *names, "class", *(label for label, *_ in cuts), *more, left=len(names))
    for point in points:
        at = [str(point["at"][field]) for field in fields]
        if not point["feasible"]:
            table.add_row(*at, "✗", *["-"] * (len(cuts) + len(more)), end_section=True)
            continue
        mean = point["mean"]
        for index, block in enumerate(mean["classes"]):
            spread = _same(point["ci95"], block["class"]) if wide else None
            cells = [_value(block[key][cut], spread[key][cut] if spread else None) for _, key, cut in cuts]
            shares = [_share(block["good_share"]) if block["class"] in asked else "–"]
            if wide:
                shares += [_share(block["starved_share"]), number(block["unfinished"], 0), _share(mean["use"]["mfu"])]
            last = index == len(mean["classes"]) - 1
            head = at if index == 0 else [""] * len(at)
            table.add_row(*head, block["class"] or "-", *cells, *shares, end_section=last)
    return table


def _table(title: str, *names: str, left: int = 0) -> Table:
    """Return an empty table. The first `left` columns and those of words are justified left, the others right."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left or name in _WORDS else "right", no_wrap=True)
    return table


def _same(ci: Mapping[str, Any] | None, klass: str) -> Mapping[str, Any] | None:
    if ci is None:
        return None
    if klass == "all":
        return dict(ci["total"])
    return next((block for block in ci["classes"] if block["class"] == klass), None)


def _value(mean: float | None, half: float | None) -> str:
    return duration(mean) if mean is None or not half else f"{duration(mean)} ±{duration(half)}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def summary_csv(data: Mapping[str, Any]) -> str:
    """Return means over seeds, with half of the 95% interval of the median where there are several."""
    out = io.StringIO()
    fields = list(data["points"][0]["at"])
    cuts = ["n", "mean", "min", "p1", "p25", "p50", "p75", "p90", "p99", "max"]
    writer = csv.writer(out, lineterminator="\n")
    shares = ["requests", "ok", "good_share", "starved_share", "unfinished"]
    writer.writerow([*fields, "feasible", "class", *shares, "metric", *cuts, "p50_ci95"])
    for point in data["points"]:
        at = [point["at"][field] for field in fields]
        if not point["feasible"]:
            writer.writerow([*at, False])
            continue
        blocks = [*point["mean"]["classes"], point["mean"]["total"]]
        spreads = [*point["ci95"]["classes"], point["ci95"]["total"]] if point["ci95"] else [None] * len(blocks)
        for block, spread in zip(blocks, spreads, strict=True):
            for _, key in METRICS:
                values = [block[key][cut] for cut in cuts]
                half = spread[key]["p50"] if spread else None
                writer.writerow([*at, True, block["class"], *(block[name] for name in shares), key, *values, half])
    return out.getvalue()


def requests_csv(records: Sequence[RequestRecord]) -> str:
    """Return one row for each request, in order of arrival."""
    out = io.StringIO()
    rows = [request_row(record) for record in records]
    if rows:
        writer = csv.DictWriter(out, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def rates_line(summary: RunSummary, *, judged: bool) -> str:
    """Return throughput and, where there were objectives, goodput, in one line."""
    body = summary.to_json()
    words = [
        f"{summary.total.ok} answered in {duration(summary.duration_s)}",
        f"{number(body['request_throughput_rps'], 2)} requests/s",
        f"{number(body['output_throughput_tps'])} output tokens/s",
        f"{number(body['total_throughput_tps'])} tokens/s with prompts",
    ]
    if judged:
        words.append(f"goodput {number(body['goodput_rps'], 2)} requests/s")
    return " · ".join(words)


def slowest_line(one: Mapping[str, Any], how: str, at: str = "") -> str:
    """Return the slowest request, and how its first token is explained. how: options of `headway why`; "": there
    is no log to explain it from. at: the point of a sweep."""
    what = f"{one['class']} " if one["class"] else ""
    wait = duration(one["waited_s"])
    words = f"first token after {wait}" if one["ttft_s"] is not None else f"no first token in {wait}"
    if one["queueing_s"] is not None:
        early, late = duration(one["queueing_s"]), duration(max(0.0, one["waited_s"] - one["queueing_s"]))
        words += f": {early} before its first chunk, {late} from there"
    lines = [f"slowest{at}: {what}{one['id']}, {tokens(one['prompt_tokens'])} prompt tokens:", f"  {words}"]
    # Not wrapped, so that it can be copied.
    return "\n".join([*lines, *([f"  headway why {one['id']} {how}"] if how else [])])


def error_table(records: Sequence[RequestRecord]) -> Table:
    """Return failed requests by reason, with the first one's full message."""
    table = _table("failed requests", "reason", "requests", "for example")
    table.columns[-1].no_wrap = False
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        if not record.ok:
            groups.setdefault(error_reason(record), []).append(record)
    for reason, mine in sorted(groups.items(), key=lambda item: -len(item[1])):
        table.add_row(reason, str(len(mine)), f"{mine[0].id}: {mine[0].error or 'unfinished'}")
    return table


def convoy_sentence(data: Mapping[str, Any]) -> str:
    """Return how long shorts waited with each policy."""
    runs = [(run["policy"], run["short"]["ttft_s"]["p50"]) for run in data["runs"]]
    words = f"shorts sent while the {tokens(data['plan']['long_tokens'])}-token prompt is read get their first token "
    words += "after " + ", ".join(f"{duration(median)} ({name})" for name, median in runs)
    if len(runs) == 2 and all(median for _, median in runs):
        words += f": {max(m for _, m in runs) / min(m for _, m in runs):.1f} times"
    return f"{words}, median"


def convoy_table(data: Mapping[str, Any], wide: bool = False) -> Table:
    """Return the table of the JSON of `headway bench convoy`. Shorts: those sent during the long prompt's prefill."""
    plan = data["plan"]
    title = (
        f"{tokens(plan['long_tokens'])}-token prompt, and {plan['short_tokens']} in / {plan['short_output']} out "
        f"every {plan['short_interval_s']:g} s until its first token"
    )
    names = ["policy", "shorts", "TTFT p50", "p99", "TBT p99", "long TTFT", "ratio", "failed"]
    if wide:
        names = ["policy", "shorts", "TTFT p50", "p90", "p99", "TBT p50", "p99", "max", "failed", "alone", "long TTFT",
                 "alone", "ratio"]  # fmt: skip
    table = _table(title, *names)
    for run in data["runs"]:
        short, long = run["short"], run["long"]
        ttft, tbt = ([duration(short[key][p]) for p in ("p50", "p90", "p99", "max")] for key in ("ttft_s", "tbt_s"))
        name = " / ".join(dict.fromkeys(word for word in (run["policy"], run["chunking"]) if word))
        first, ratio, failed = duration(long["ttft_s"]["p50"]), number(long["slowdown"], 2), str(short["failed"])
        cells = [ttft[0], ttft[2], tbt[2], first, ratio, failed]
        if wide:
            alone = [duration(short["alone_ttft_s"]), first, duration(long["alone_s"]), ratio]
            cells = [*ttft[:3], tbt[0], *tbt[2:], failed, *alone]
        table.add_row(name, str(short["n"]), *cells)
    return _folded(table)


def ratio_table(data: Mapping[str, Any]) -> Table:
    """Return the table of each further server's times over the first one's."""
    names = [name for name in data["ratios"][0] if name != "policy"]
    title = f"times over those of {data['runs'][0]['policy']}"
    table = _table(title, "server", *(name.replace("_", " ") for name in names))
    for row in data["ratios"]:
        table.add_row(row["policy"], *(number(row[name], 2) for name in names))
    return _folded(table)


def _folded(table: Table) -> Table:
    """Let the first column, of servers' addresses, take several lines where the terminal is narrow."""
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    return table


CALIBRATION_METRICS = (("TTFT", "ttft_s"), ("TBT", "tbt_s"), ("worst TBT", "max_tbt_s"), ("JCT", "e2e_s"))


def calibration_report(data: Mapping[str, Any]) -> RenderableType:
    """Return the table of the JSON of `headway profile check`."""
    errors = _table("iteration time: error of the prediction", "predicted by", "mean", "median", "P90")
    for label, key in (
        ("the scheduler, correcting itself", "running"),
        ("the profile that it started from", "profile"),
    ):
        row = data["iteration_error"][key]
        errors.add_row(label, *(_share(row[cut]) for cut in ("mean", "p50", "p90")))
    names = ("metric", "measured p50", "simulated", "error", "measured p90", "simulated", "error")
    table = _table("what requests saw", *names)
    live, predicted = data["measured"]["total"], data["simulated"]["total"]
    for label, key in CALIBRATION_METRICS:
        cells: list[str] = []
        for cut in ("p50", "p90"):
            one, other = live[key][cut], predicted[key][cut]
            error = other / one - 1 if one and other is not None else None
            cells += [duration(one), duration(other), "-" if error is None else f"{error:+.1%}"]
        table.add_row(label, *cells)
    host = f"engine's own time between iterations, added to each: {duration(data['host_s'])} (median of the run)"
    return Group(errors, table, host)


# Progress bars of load runs and of simulations.


class StepBar:
    """A bar on stderr, if that is a terminal, that appears with its first step and vanishes at its end. A context
    manager, called with the steps done, and all."""

    def __init__(self, text: str, total: int | None = None, *, shown: bool = True) -> None:
        """text: the column before the bar. total: None: not known yet. shown: False: nothing is drawn."""
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn(text),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        self._step(completed=done, total=total)

    def _step(self, **change: Any) -> None:
        self._bar.start()
        self._bar.update(self._task, **change)


class LoadProgress(StepBar):
    """Progress of a load run: answered, open, failed."""

    def __init__(self, total: int) -> None:
        super().__init__("{task.description}", total)
        self._open = self._failed = 0

    def sent(self) -> None:
        """Count a request that was sent."""
        self._open += 1
        self._step(description=self._words())

    def done(self, ok: bool) -> None:
        """Count a request that has ended."""
        self._open -= 1
        self._failed += not ok
        self._step(advance=1, description=self._words())

    def _words(self) -> str:
        failed = f", [red]{self._failed} failed[/red]" if self._failed else ""
        return f"{self._open} open{failed}"


class RunProgress(StepBar):
    """Number of simulations done. total: None: how many there will be is known only at the end."""

    def __init__(self, total: int | None) -> None:
        super().__init__("simulating {task.description}", total)

    def done(self, name: str = "") -> None:
        """Count a simulation that has ended. name: what it simulated."""
        self._step(advance=1, description=name)
