"""Table of predicted against measured: iteration times, then latencies of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from headway.sim.report.units import duration

ROWS = (("TTFT", "ttft_s"), ("TBT", "tbt_s"), ("worst TBT", "max_tbt_s"), ("JCT", "e2e_s"))


def calibration_report(data: Mapping[str, Any]) -> RenderableType:
    """Return the table of the JSON of `headway profile check`."""
    errors = Table(title="iteration time: error of the prediction", title_justify="left")
    for name in ("predicted by", "mean", "median", "P90"):
        errors.add_column(name, justify="left" if name == "predicted by" else "right")
    for label, key in (
        ("the scheduler, correcting itself", "running"),
        ("the profile that it started from", "profile"),
    ):
        row = data["iteration_error"][key]
        errors.add_row(label, *(_share(row[cut]) for cut in ("mean", "p50", "p90")))
    table = Table(title="what requests saw", title_justify="left")
    table.add_column("metric")
    for name in ("measured p50", "simulated", "error", "measured p90", "simulated", "error"):
        table.add_column(name, justify="right")
    live, predicted = data["measured"]["total"], data["simulated"]["total"]
    for label, key in ROWS:
        cells: list[str] = []
        for cut in ("p50", "p90"):
            one, other = live[key][cut], predicted[key][cut]
            error = other / one - 1 if one and other is not None else None
            cells += [duration(one), duration(other), "-" if error is None else f"{error:+.1%}"]
        table.add_row(label, *cells)
    host = f"engine's own time between iterations, added to each: {duration(data['host_s'])} (median of the run)"
    return Group(errors, table, host)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
