"""Starvation of long requests under PecSched as the short load grows (not covered by §5). Short load 0.5 to 1.0, long
load 0.3, so up to 1.3 of what the cluster can compute. The setting: `setting`.

Default mode ages: a long prefill is suspended for about as long as it computes, no longer. So long requests get at
least half of the cluster, and queue for each other where they need more: each row has the number that arrived. Paper
mode does not age, and is shown at the highest load.
"""

from __future__ import annotations

from headway_research.base import ExperimentReport, PlotPanel, RunOptions
from headway_research.pecsched.setting import SWEEP, PecSchedStudy
from headway_research.verdicts import judge, order

SHARES = {
    "starved": "share of long requests that never begin",
    "unfinished": "share of long requests of the window's first half that have not ended when it ends",
}
TOP = 1.0


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""
    runs = PecSchedStudy(options)
    loads = (0.5, TOP) if options.quick else tuple(SWEEP)
    regimes = [SWEEP[load] for load in loads]
    runs.ensure([("PecSched", "default")], regimes)
    runs.ensure([("PecSched", "paper")], [SWEEP[TOP]])

    def by_load(name: str, metric: str) -> dict[str, float]:
        found = {f"{load:.1f}": runs.value(name, "PecSched", "default", SWEEP[load], metric) for load in loads}
        return {load: value for load, value in found.items() if value is not None}

    def came(name: str) -> str:
        counts = ", ".join(f"{count:g}" for count in by_load(name, "longs").values())
        return f"Long requests that came: {counts}, of {runs.expected_longs(name, SWEEP[TOP]):.1f} expected."

    rows = [
        judge(
            f"{name}: {words}, with ageing, by the load of short ones",
            "not stated",
            order("none at any load", lambda found: bool(found) and max(found.values()) == 0),
            {"paper": None, "default": by_load(name, metric)},
            came(name),
        )
        for metric, words in SHARES.items()
        for name in runs.names
    ]
    rows += [
        judge(
            f"Short load {TOP:g}, without ageing: {words}",
            "not stated",
            order("above 0 for every model", lambda found: bool(found) and min(found.values()) > 0),
            {"paper": runs.values("PecSched", "paper", SWEEP[TOP], metric), "default": None},
        )
        for metric, words in SHARES.items()
    ]
    panels = tuple(
        PlotPanel(
            title=f"{title}, with ageing",
            x="load of short requests",
            y="seconds",
            log_y=True,
            lines={
                name: [(float(load), max(1e-4, value)) for load, value in by_load(name, metric).items()]
                for name in runs.names
            },
        )
        for metric, title in (("long_jct_s", "Mean JCT of long requests"), ("delay_s", "P99 queueing of short ones"))
    )
    return ExperimentReport(source=runs.source(regimes), rows=tuple(rows), panels=panels)
