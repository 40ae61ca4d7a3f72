"""Medha Fig. 14 (§6.5): LoongServe with two of its eight instances kept for short prompts, 5% long requests.

A pool for short prompts takes them out of the convoy and leaves fewer instances to the long ones. First seed only, at
two rates: one below and one above what the machine carries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.setting import LONG_SHARE, SEEDS, MedhaStudy, scenario
from headway_research.verdicts import at_least, band, order

SYSTEMS = ("LoongServe", "LoongServe+Reserv", "Medha")
RATES = (0.75, 1.75)


def run(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 14."""
    runs = MedhaStudy(options, seeds=SEEDS[:1])
    runs.ensure([(system, mode) for system in SYSTEMS for mode in MODES], RATES, [LONG_SHARE])

    rows = [row for qps in RATES for row in _rows(runs, qps)]
    panels = (
        _panel(
            "long requests done", "share", lambda qps: {s: longs_done(runs, s, qps, "default") for s in SYSTEMS}, False
        ),
        _panel("median TPOT", "seconds", lambda qps: _by_system(runs, "tpot_s", "p50", qps, "default"), True),
        _panel(
            "P90 TTFT of chats", "seconds", lambda qps: _by_system(runs, "short_ttft_s", "p90", qps, "default"), True
        ),
    )
    ring = "LoongServe's prefills: derived, one TP2 instance's fitted latency on a ring (latency.ring); decodes: fitted"
    shown = scenario("LoongServe+Reserv", "default", RATES[-1], LONG_SHARE, runs.window_s)
    source = runs.source(latency_loongserve=ring, loongserve_as_scenario_file=shown)
    return ExperimentReport(source=source, rows=tuple(rows), panels=panels)


def longs_done(runs: MedhaStudy, system: str, qps: float, mode: Mode) -> float:
    """Return the share of long requests that were done, a mean over seeds."""
    return sum(result.longs_done or 0.0 for result in runs.results(system, mode, qps)) / len(runs.seeds)


def _by_system(runs: MedhaStudy, metric: str, cut: str, qps: float, mode: Mode) -> dict[str, float]:
    return {system: runs.value(system, mode, qps, metric, cut) or 0.0 for system in SYSTEMS}


def _rows(runs: MedhaStudy, qps: float) -> list[ClaimRow]:
    """Return the rows of one rate."""

    def fewer(than: str, mode: Mode) -> float:
        return longs_done(runs, "LoongServe+Reserv", qps, mode) / max(longs_done(runs, than, qps, mode), 1e-9)

    def blocked(mode: Mode) -> float:
        found = _by_system(runs, "short_ttft_s", "p90", qps, mode)
        return found["LoongServe"] / (found["LoongServe+Reserv"] or 1.0)

    return [
        runs.judge(
            f"{qps:g} QPS: long requests done with the pool over LoongServe without",
            "10% lower",
            band(0.75, 0.99),
            partial(fewer, "LoongServe"),
            "Of those that arrived in the window.",
        ),
        runs.judge(
            f"{qps:g} QPS: long requests done with the pool over Medha's",
            "up to 20% lower",
            band(0.75, 0.99),
            partial(fewer, "Medha"),
        ),
        runs.judge(
            f"{qps:g} QPS: median TPOT, seconds",
            "Medha < with the pool < LoongServe",
            order(
                "Medha < with the pool < LoongServe",
                lambda v: v["Medha"] < v["LoongServe+Reserv"] < v["LoongServe"],
            ),
            partial(_by_system, runs, "tpot_s", "p50", qps),
            "Decodes of TP2 instances that share with nobody beside micro-batches of TP8 × two stages with chunks.",
        ),
        runs.judge(
            f"{qps:g} QPS: P90 TTFT of chats, LoongServe's over the pool's",
            "mitigates blocking of short requests",
            at_least(2.0),
            blocked,
        ),
    ]


def _panel(title: str, y: str, find: Callable[[float], dict[str, float]], log: bool) -> ReportChart:
    lines = {system: [(qps, find(qps)[system]) for qps in RATES] for system in SYSTEMS}
    return ReportChart(title=f"{title}, default mode", x="QPS", y=y, lines=lines, log_y=log)
