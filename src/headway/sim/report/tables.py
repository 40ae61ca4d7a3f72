"""Terminal tables and CSV of results: simulations, load runs, convoys, calibrations. Progress goes to stderr.

Tables are made from the JSON that the commands write, so that a file shows what the terminal showed.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from headway.sim.metrics import (
    ClassSummary,
    RequestRecord,
    RunSummary,
    e2e_s,
    error_reason,
    is_good,
    normalised_latency_s,
    queueing_s,
    tbt_s,
    tpot_s,
    ttft_s,
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
    """Print a result on stdout; the width is large enough not to cut columns."""
    console = Console(highlight=False)
    # A table that is wider than the terminal is not squeezed: the terminal wraps its lines, and no name is cut.
    wide = Console(highlight=False, width=1000)
    needed = wide.measure(thing).maximum
    if not console.is_terminal:
        needed = max(needed, 140)
    if needed > console.width:
        console = Console(highlight=False, width=min(needed, 1000))
    console.print(thing)


METRICS = (
    ("TTFT", "ttft_s"),
    ("TBT", "tbt_s"),
    ("worst TBT", "max_tbt_s"),
    ("normalised", "normalised_latency_s"),
    ("queueing", "queueing_s"),
    ("JCT", "e2e_s"),
)
_WORDS = frozenset(("class", "metric", "reason", "for example", "policy", "server", "predicted by"))
CUTS = ("p1", "p25", "p50", "p75", "p99", "max")
SPREADS = ("p50", "p99")
SWEEP_CUTS = (("TTFT", "ttft_s", "p50"), ("", "ttft_s", "p99"), ("TBT", "tbt_s", "p50"), ("", "tbt_s", "p99"),
              ("worst TBT", "max_tbt_s", "p99"), ("JCT", "e2e_s", "p50"))  # fmt: skip
"""Columns of a sweep: label, metric, percentile; without a label: of the metric before."""


def simulation_report(data: Mapping[str, Any]) -> RenderableType:
    """Return the terminal output of a result: the only point in full, or a sweep as a table."""
    points = data["points"]
    if len(points) == 1 and not points[0]["at"]:
        return point_table(points[0], data["scenario"].get("name") or "")
    return sweep_table(points, data["scenario"].get("name") or "")


def point_table(point: Mapping[str, Any], title: str) -> RenderableType:
    """Latencies per class, then rates and use. Several seeds: means, with half of the 95% interval in columns of its
    own."""
    if not point["feasible"]:
        return f"{title}: infeasible: {point['why']}"
    mean, ci = point["mean"], point["ci95"]
    table = Table(title=title or None, title_justify="left")
    _columns(table, "class", "requests", "good", "starved", "metric", *CUTS, *(f"± {cut}" for cut in SPREADS if ci))
    blocks = mean["classes"] if len(mean["classes"]) == 1 else [*mean["classes"], mean["total"]]
    for block in blocks:
        spread = _same(ci, block["class"])
        for index, (label, key) in enumerate(METRICS):
            cells = [duration(block[key][cut]) for cut in CUTS]
            cells += [duration(spread[key][cut]) for cut in SPREADS] if spread else []
            head = _head(block) if index == 0 else [""] * 4
            table.add_row(*head, label, *cells, end_section=index == len(METRICS) - 1)
    return Group(table, use_lines(point))


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
        lines.append(f"means of {seeds} seeds; ±: half of the 95% confidence interval")
    return "\n".join(lines)


def sweep_table(points: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return one row for each point and class; layouts that do not fit in memory have a row with the reason."""
    fields = list(points[0]["at"])
    short = [field.rpartition(".")[2] for field in fields]
    # "qps" for workload.qps, unless two swept fields end alike; the title has them in full.
    names = short if len(set(short)) == len(short) and "class" not in short else fields
    heading = f"{title}: {' × '.join(fields)}" if title else " × ".join(fields)
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (*names, "class"):
        table.add_column(name, no_wrap=True)
    for name in (*(f"{label} {cut}" for label, _, cut in SWEEP_CUTS), "good", "starved", "unfinished", "MFU"):
        table.add_column(name.strip(), justify="right", no_wrap=True)
    for point in points:
        at = [str(point["at"][field]) for field in fields]
        if not point["feasible"]:
            table.add_row(*at, "✗ infeasible", *["-"] * 10, end_section=True)
            continue
        mean = point["mean"]
        for index, block in enumerate(mean["classes"]):
            spread = _same(point["ci95"], block["class"])
            cells = [_value(block[key][cut], spread[key][cut] if spread else None) for _, key, cut in SWEEP_CUTS]
            shares = [_share(block["good_share"]), _share(block["starved_share"]), number(block["unfinished"], 0)]
            head = at if index == 0 else [""] * len(at)
            last = index == len(mean["classes"]) - 1
            table.add_row(*head, block["class"] or "-", *cells, *shares, _share(mean["use"]["mfu"]), end_section=last)
    return table


def _columns(table: Table, *names: str) -> None:
    """Add columns; those of words are justified left, those of numbers right."""
    for name in names:
        table.add_column(name, justify="left" if name in _WORDS else "right")


def _head(block: Mapping[str, Any]) -> list[str]:
    count = f"{number(block['ok'], 0)} of {number(block['requests'], 0)}"
    return [block["class"] or "-", count, _share(block["good_share"]), _share(block["starved_share"])]


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
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["id", "class", "arrival_s", "prompt_tokens", "output_tokens", "queueing_s", "ttft_s", "tpot_s", "max_tbt_s",
         "e2e_s", "normalised_latency_s", "good", "error", "cached_tokens"]
    )  # fmt: skip
    for r in records:
        latencies = (
            queueing_s(r),
            ttft_s(r),
            tpot_s(r),
            max(tbt_s(r), default=None),
            e2e_s(r),
            normalised_latency_s(r),
        )
        counts = (r.prompt_tokens, r.output_tokens)
        writer.writerow([r.id, r.klass, r.arrival_s, *counts, *latencies, is_good(r), r.error or "", r.cached_tokens])
    return out.getvalue()


LOAD_METRICS = (("TTFT", "ttft_s"), ("TBT", "tbt_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))


def load_table(summary: RunSummary, metrics: Sequence[tuple[str, str]] = LOAD_METRICS) -> Table:
    """One row a class and metric with P50, P90, P99 and the maximum; a last block over all where there are classes."""
    table = Table()
    _columns(table, "class", "requests", "prompt tok", "output tok", "good", "metric", "p50", "p90", "p99", "max")
    blocks = [*summary.classes, summary.total] if len(summary.classes) > 1 else [*summary.classes]
    for block in blocks:
        head = _load_head(block)
        for index, (label, key) in enumerate(metrics):
            values = block.latencies[key]
            cells = [duration(values[p]) for p in ("p50", "p90", "p99", "max")]
            table.add_row(
                *(head if index == 0 else [""] * len(head)), label, *cells, end_section=index == len(metrics) - 1
            )
    return table


def _load_head(block: ClassSummary) -> list[str]:
    count = str(block.ok) if block.ok == block.requests else f"{block.ok} of {block.requests}"
    good = "-" if block.good_share is None else f"{block.good_share:.0%}"
    return [block.klass or "-", count, tokens(block.prompt_tokens), tokens(block.output_tokens), good]


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


def error_table(records: Sequence[RequestRecord]) -> Table:
    """Return failed requests by reason, with the first one's full message."""
    table = Table(title="failed requests", title_justify="left")
    _columns(table, "reason", "requests", "for example")
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        if not record.ok:
            groups.setdefault(error_reason(record), []).append(record)
    for reason, mine in sorted(groups.items(), key=lambda item: -len(item[1])):
        table.add_row(reason, str(len(mine)), f"{mine[0].id}: {mine[0].error or 'unfinished'}")
    return table


def convoy_table(data: Mapping[str, Any]) -> Table:
    """Return the table of the JSON of `headway bench convoy`. Shorts: those sent during the long prompt's prefill."""
    plan = data["plan"]
    table = Table(
        title=f"{tokens(plan['long_tokens'])}-token prompt, and {plan['short_tokens']} in / {plan['short_output']} out "
        f"every {plan['short_interval_s']:g} s until its first token"
    )
    _columns(table, "policy", "shorts", "TTFT p50", "p90", "p99", "TBT p50", "p99", "max", "failed", "alone",
             "long TTFT", "alone", "ratio")  # fmt: skip
    for run in data["runs"]:
        short, long = run["short"], run["long"]
        ttft, tbt = short["ttft_s"], short["tbt_s"]
        table.add_row(
            " / ".join(word for word in (run["policy"], run["chunking"]) if word),
            str(short["n"]),
            *(duration(ttft[p]) for p in ("p50", "p90", "p99")),
            *(duration(tbt[p]) for p in ("p50", "p99", "max")),
            str(short["failed"]),
            duration(short["alone_ttft_s"]),
            duration(long["ttft_s"]["p50"]),
            duration(long["alone_s"]),
            number(long["slowdown"], 2),
        )
    return table


def ratio_table(data: Mapping[str, Any]) -> Table:
    """Return the table of each further server's times over the first one's."""
    table = Table(title=f"times over those of {data['runs'][0]['policy']}")
    names = [name for name in data["ratios"][0] if name != "policy"]
    _columns(table, "server", *(name.replace("_", " ") for name in names))
    for row in data["ratios"]:
        table.add_row(row["policy"], *(number(row[name], 2) for name in names))
    return table


CALIBRATION_METRICS = (("TTFT", "ttft_s"), ("TBT", "tbt_s"), ("worst TBT", "max_tbt_s"), ("JCT", "e2e_s"))


def calibration_report(data: Mapping[str, Any]) -> RenderableType:
    """Return the table of the JSON of `headway profile check`."""
    errors = Table(title="iteration time: error of the prediction", title_justify="left")
    _columns(errors, "predicted by", "mean", "median", "P90")
    for label, key in (
        ("the scheduler, correcting itself", "running"),
        ("the profile that it started from", "profile"),
    ):
        row = data["iteration_error"][key]
        errors.add_row(label, *(_share(row[cut]) for cut in ("mean", "p50", "p90")))
    table = Table(title="what requests saw", title_justify="left")
    _columns(table, "metric", "measured p50", "simulated", "error", "measured p90", "simulated", "error")
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
