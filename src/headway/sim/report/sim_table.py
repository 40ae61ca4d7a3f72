"""Tables of `headway simulate`'s JSON: one point in full, or one line a point and class of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from headway.sim.report.units import duration, number, tokens

METRICS = (
    ("TTFT", "ttft_s"),
    ("TBT", "tbt_s"),
    ("worst TBT", "max_tbt_s"),
    ("normalised", "normalised_latency_s"),
    ("queueing", "queueing_s"),
    ("JCT", "e2e_s"),
)
CUTS = ("p1", "p25", "p50", "p75", "p99", "max")
SPREADS = ("p50", "p99")


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
    for name in ("class", "requests", "good", "starved", "metric"):
        table.add_column(name, justify="right" if name in ("requests", "good", "starved") else "left")
    for cut in (*CUTS, *(f"± {cut}" for cut in SPREADS if ci)):
        table.add_column(cut, justify="right")
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
    for name in (
        "TTFT p50",
        "p99",
        "TBT p50",
        "p99",
        "worst TBT p99",
        "JCT p50",
        "good",
        "starved",
        "unfinished",
        "MFU",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        at = [str(point["at"][field]) for field in fields]
        if not point["feasible"]:
            table.add_row(*at, "✗ infeasible", *["-"] * 10, end_section=True)
            continue
        mean = point["mean"]
        for index, block in enumerate(mean["classes"]):
            spread = _same(point["ci95"], block["class"])
            cells = [
                _value(block[key][cut], spread[key][cut] if spread else None)
                for key, cut in (
                    ("ttft_s", "p50"), ("ttft_s", "p99"), ("tbt_s", "p50"), ("tbt_s", "p99"),
                    ("max_tbt_s", "p99"), ("e2e_s", "p50"),
                )
            ]  # fmt: skip
            shares = [_share(block["good_share"]), _share(block["starved_share"]), number(block["unfinished"], 0)]
            head = at if index == 0 else [""] * len(at)
            last = index == len(mean["classes"]) - 1
            table.add_row(*head, block["class"] or "-", *cells, *shares, _share(mean["use"]["mfu"]), end_section=last)
    return table


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
