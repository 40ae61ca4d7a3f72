"""Tables of a load run: latencies by class, rates, and failures by reason."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from headway.sim.metrics import ClassSummary, RequestRecord, RunSummary
from headway.sim.metrics.summary import error_reason
from headway.sim.report.units import duration, number, tokens

METRICS = (("TTFT", "ttft_s"), ("TBT", "tbt_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))


def load_table(summary: RunSummary, metrics: Sequence[tuple[str, str]] = METRICS) -> Table:
    """One row a class and metric with P50, P90, P99 and the maximum; a last block over all where there are classes."""
    table = Table()
    for name in ("class", "requests", "prompt tok", "output tok", "good", "metric"):
        table.add_column(name, justify="left" if name in ("class", "metric") else "right")
    for name in ("p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    blocks = [*summary.classes, summary.total] if len(summary.classes) > 1 else [*summary.classes]
    for block in blocks:
        head = _head(block)
        for index, (label, key) in enumerate(metrics):
            values = block.latencies[key]
            cells = [duration(values[p]) for p in ("p50", "p90", "p99", "max")]
            table.add_row(
                *(head if index == 0 else [""] * len(head)), label, *cells, end_section=index == len(metrics) - 1
            )
    return table


def _head(block: ClassSummary) -> list[str]:
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
    for name in ("reason", "requests", "for example"):
        table.add_column(name, justify="right" if name == "requests" else "left")
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        if not record.ok:
            groups.setdefault(error_reason(record), []).append(record)
    for reason, mine in sorted(groups.items(), key=lambda item: -len(item[1])):
        table.add_row(reason, str(len(mine)), f"{mine[0].id}: {mine[0].error or 'unfinished'}")
    return table
