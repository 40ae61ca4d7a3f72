"""Terminal output of a report: a table of claims, then the source of its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from headway_research.verdicts import HELD, HOLDS, MISSED, allowed


def report_table(data: Mapping[str, Any], about: str) -> RenderableType:
    """Return a sentence with the verdicts, and the table of one report's JSON, titled by its id and `about`."""
    table = Table(title=f"{data['id']} · {about}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("claim", ratio=5)
    table.add_column("paper", ratio=3)
    table.add_column("paper mode", ratio=3)
    table.add_column("default mode", ratio=3)
    table.add_column("verdict", ratio=3)
    for row in data["rows"]:
        verdict, kind = row["verdict"], row["kind"] if row["paper"] is not None else f"{row['kind']}, our own"
        colour = "green" if verdict == HOLDS else "yellow" if allowed(verdict) and MISSED not in verdict else "red"
        ours = row["ours"]
        cells = [_cell(row["claim"]), _cell(row["paper"]), _cell(ours["paper_mode"]), _cell(ours["default_mode"])]
        table.add_row(*cells, f"[{colour}]{escape(verdict)}[/{colour}] ({kind})", end_section=True)
    held = sum(row["verdict"] in HELD for row in data["rows"])
    missed = sum(MISSED in row["verdict"] for row in data["rows"])
    one_mode = len(data["rows"]) - held - missed
    words = f"{held} of {len(data['rows'])} rows hold, {one_mode} in one mode only, {missed} are not reproduced"
    return Group(words, table, escape(_source(data["source"])))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return escape(", ".join(f"{key}: {_cell(item)}" for key, item in value.items()))
    if isinstance(value, float):
        return f"{value:.4g}"
    return escape(str(value))


def _source(source: Mapping[str, Any]) -> str:
    latency = source["latency"]
    if isinstance(latency, list):
        latency = "; ".join(
            f"{item['of']}: {item['status']}, history measured up to {item['validated_history']:,}" for item in latency
        )
    lines = [f"latency: {latency}", f"scenario: {source['scenario']}"]
    if source["seeds"]:
        window = "to the last request's end" if source["window_s"] is None else f"{source['window_s']:g} s"
        seeds = ", ".join(map(str, source["seeds"]))
        # Its rows may move with another seed, by how much is not known.
        spread = "one seed, so no row's spread is known" if len(source["seeds"]) == 1 else f"seeds {seeds}"
        lines.append(f"{spread}; window {window}")
    for regime, models in source.get("long_requests", {}).items():
        counts = ", ".join(f"{name} {'/'.join(map(str, found))}" for name, found in models.items())
        lines.append(f"long requests a run, {regime}: {counts}")
    return "\n".join(lines)
