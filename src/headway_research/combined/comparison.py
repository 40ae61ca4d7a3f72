"""The ladder against the placements of papers: where it wins, and where it does not.

The setting and its names: `combined.setting`. The claims: the most first tokens in time and the least mean TTFT of all;
the P99 of all, which the longest prompts set, near Tetris's; short requests wait no longer than under PecSched.
"""

from __future__ import annotations

from typing import Any

from headway.sim.report.page import ReportChart
from headway_research.base import ClaimRow, ExperimentReport, RunOptions, as_words, source
from headway_research.combined.setting import (
    AZURE_RATE,
    MODEL,
    RATES,
    REGIMES,
    SYSTEMS,
    CombinedStudy,
    Setting,
    scenario,
)
from headway_research.verdicts import VerdictRule, at_most, judge, order

LONGEST = 1.25
"""Bound of the P99 of all requests, which are the longest prompts, over Tetris's."""


def tetris(options: RunOptions) -> ExperimentReport:
    """Compare the systems on Tetris's workloads."""
    runs = CombinedStudy(options, "tetris")
    latency = "Eq. (1) fitted to Tetris's Table 1 (c = 2d), for groups and for iterations of one instance"
    where = (
        "Llama-3 8B, 16 A100 prefill instances on two nodes, Tetris-like lengths, Poisson, "
        f"{int(runs.size)} requests a run; short: up to 16K tokens, long: from 64K on; improvement rates {RATES}"
    )
    return _report(runs, source(latency, where, runs.seeds))


def azure(options: RunOptions) -> ExperimentReport:
    """Compare the systems on PecSched's rewriting of Azure's conversations."""
    runs = CombinedStudy(options, "azure")
    latency = "fitted A100 operator profiles inside instances (tp 4); groups: fast-SP formulas, corrected"
    where = (
        f"{MODEL}, 32 A100, tp 4; Azure-like short requests, 100K to 500K uniform long ones; improvement rate "
        f"{AZURE_RATE}"
    )
    shown = scenario("Ladder", REGIMES[0], runs.size)
    return _report(runs, source(latency, where, runs.seeds, runs.size, as_scenario_file=shown))


def _report(runs: CombinedStudy, origin: dict[str, Any]) -> ExperimentReport:
    rows = [row for place in runs.places for row in _rows(runs, place)]
    titles = {"mean": "Mean TTFT", "p99": "P99 TTFT", "in_time": "First tokens in time"}
    panels = tuple(_panel(runs, what, title) for what, title in titles.items())
    return ExperimentReport(source=origin, rows=tuple(rows), panels=panels)


def named(setting: Setting, place: tuple[str, float]) -> str:
    """Return the name of a workload and load, for claims and axes."""
    return f"{place[0]}, {place[1]:g} requests/s" if setting == "tetris" else place[0]


def _rows(runs: CombinedStudy, place: tuple[str, float]) -> list[ClaimRow]:
    where = named(runs.setting, place)
    shorts, longs = runs.values(place, "short_p50"), runs.values(place, "long_p50")
    short, p99 = runs.values(place, "short_p99"), runs.values(place, "p99")
    pauses = f"{runs.value(place, 'Ladder', 'pauses'):g} and {runs.value(place, 'PecSched', 'pauses'):g}"
    return [
        _own(
            f"{where}: share of first tokens in time",
            order("Ladder's the largest", lambda v: v["Ladder"] >= max(v.values())),
            runs.values(place, "in_time"),
            f"Of short ones: {as_words(runs.values(place, 'short_in_time'))}. "
            f"Of long ones: {as_words(runs.values(place, 'long_in_time'))}.",
        ),
        _own(
            f"{where}: mean TTFT, s",
            order("Ladder's the least", lambda v: v["Ladder"] <= min(v.values())),
            runs.values(place, "mean"),
            f"Medians of short ones: {as_words(shorts)}. Of long ones: {as_words(longs)}.",
        ),
        _own(
            f"{where}: P99 TTFT of all requests, Ladder over Tetris",
            at_most(LONGEST),
            p99["Ladder"] / p99["Tetris"] if p99["Tetris"] else None,
            f"Seconds: {as_words(p99)}.",
        ),
        _own(
            f"{where}: P99 TTFT of short requests, s",
            order("Ladder's at most PecSched's", lambda v: v["Ladder"] <= v["PecSched"]),
            short,
            f"Groups were paused {pauses} times under the ladder and PecSched.",
        ),
    ]


def _own(claim: str, check: VerdictRule, value: Any, note: str = "") -> ClaimRow:
    """Return the row of a claim of our own: all systems run in default mode, and no paper has a number."""
    return judge(claim, "no paper has it", check, {"paper": None, "default": value}, note)


def _panel(runs: CombinedStudy, what: str, title: str) -> ReportChart:
    lines = {
        system: [(k, max(1e-3, runs.value(place, system, what))) for k, place in enumerate(runs.places)]
        for system in SYSTEMS
    }
    places = "; ".join(f"{k}: {named(runs.setting, place)}" for k, place in enumerate(runs.places))
    return ReportChart(
        title=title, x=places, y="share" if what == "in_time" else "s", lines=lines, log_y=what != "in_time"
    )
