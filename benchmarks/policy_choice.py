"""Compare the default with the best policy of each cell of docs/reference/policy-table.md, which has the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
TABLE = REFERENCE / "policy-table.md"
DEFAULT = "ladder, default"
WITHIN = 0.05
TITLE = "## The default against the best"
WORDS = (
    "The default's value and, where it is more than 5% better, the best of the table with its policy. Bold: the\n"
    "default is within 5% of the best.\n\n"
)


class TableRow(NamedTuple):
    """A row of the table: seconds (P50, P99, worst) to the first token, and the share that was in time."""

    workload: str
    load: str
    policy: str
    short: tuple[float, ...]
    long: tuple[float, ...]
    """Empty: the workload has none."""
    in_time: float


def rows(text: str) -> Iterator[TableRow]:
    """Parse the table."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 7 and cells[6].endswith("%"):
            workload, load, policy, short, long, _, in_time = cells
            yield TableRow(workload, load, policy, _times(short), _times(long), float(in_time.rstrip("%")))


def cells(text: str) -> dict[tuple[str, str], list[TableRow]]:
    """Return the rows of each workload and load."""
    found: dict[tuple[str, str], list[TableRow]] = {}
    for row in rows(text):
        found.setdefault((row.workload, row.load), []).append(row)
    return found


def default_row(cell: list[TableRow]) -> TableRow:
    """Return the default's row of a cell."""
    return next(row for row in cell if row.policy == DEFAULT)


def default_is_best(cell: list[TableRow]) -> bool:
    """Whether the default's share of requests in time is within 5% of the best's."""
    return default_row(cell).in_time >= (1 - WITHIN) * max(row.in_time for row in cell)


def comparison(text: str) -> str:
    """Return the comparison as a section in Markdown."""
    lines = [
        "| workload | load | in time: default, best | short P99, s | long P99, s |",
        "|---|---|---|---|---|",
    ]
    for (workload, load), cell in cells(text).items():
        mine = default_row(cell)
        most = max(cell, key=lambda row: row.in_time)
        share = f"**{mine.in_time:g}%**" if default_is_best(cell) else f"{mine.in_time:g}%"
        share += "" if most.in_time == mine.in_time else f", {most.in_time:g}% ({most.policy})"
        short = _against(cell, lambda row: row.short[1])
        long = _against(cell, lambda row: row.long[1]) if mine.long else "–"
        lines.append(f"| {workload} | {load} | {share} | {short} | {long} |")
    return f"{TITLE}\n\n{WORDS}" + "\n".join(lines) + "\n"


def _against(cell: list[TableRow], value: Callable[[TableRow], float]) -> str:
    mine, least = value(default_row(cell)), min(cell, key=value)
    if mine <= (1 + WITHIN) * value(least):
        return f"**{mine:g}**"
    return f"{mine:g}, {value(least):g} ({least.policy})"


def _times(cell: str) -> tuple[float, ...]:
    return () if cell == "–" else tuple(float(value) for value in cell.split("/"))
