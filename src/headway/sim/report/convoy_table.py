"""Tables of a convoy run: one row for each policy or server, and ratios of servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from headway.sim.report.units import duration, number, tokens


def convoy_table(data: Mapping[str, Any]) -> Table:
    """Return the table of the JSON of `headway bench convoy`. Shorts: those sent during the long prompt's prefill."""
    plan = data["plan"]
    table = Table(
        title=f"{tokens(plan['long_tokens'])}-token prompt, and {plan['short_tokens']} in / {plan['short_output']} out "
        f"every {plan['short_interval_s']:g} s until its first token"
    )
    table.add_column("policy")
    for name in (
        "shorts",
        "TTFT p50",
        "p90",
        "p99",
        "TBT p50",
        "p99",
        "max",
        "failed",
        "alone",
        "long TTFT",
        "alone",
        "ratio",
    ):
        table.add_column(name, justify="right")
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
    table.add_column("server")
    names = [name for name in data["ratios"][0] if name != "policy"]
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in data["ratios"]:
        table.add_row(row["policy"], *(number(row[name], 2) for name in names))
    return table
