"""Medha Fig. 13 and §6.4: effect of the order of prefills and of multi-prefill batching, under the one setting.

The figure shows CDFs of TTFT; its claims are ratios of medians. Not in the paper, and beside the others: SRPT, because
it beats LARS on most requests, and the ladder, because it is Headway's default. The paper's gain of multi-prefill
batching (1.6-1.8×) rests on a deadline that it does not define; ours is reported at each rate as it comes out.
"""

from __future__ import annotations

from functools import partial
from statistics import median

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.setting import SEEDS, MedhaStudy
from headway_research.verdicts import at_least, at_most, band, both, judge

POLICIES = ("FCFS", "EDF", "LRS", "SRPT", "LARS", "Medha")
COLLAPSE = 30.0
HELD = "LARS alone holds a chat back until it is nearly late: its deadline of a second is a hundred times its work."


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""
    runs = MedhaStudy(options, seeds=SEEDS[:1])
    runs.ensure([(policy, mode) for mode in MODES for policy in (*POLICIES, *_ours(mode))], runs.qps, [0.05])
    low = runs.qps[0]
    rows = [
        judge(
            f"{policy}'s median TTFT over Medha's at {qps:g} QPS",
            "collapses as FCFS does; 30× at high load",
            at_least(COLLAPSE),
            both(partial(_over_medha, runs, policy, qps)),
        )
        for qps in runs.qps
        if qps >= 1.25
        for policy in ("FCFS", "EDF", "LRS")
    ]
    rows += [
        judge(
            f"At {low:g} QPS EDF's median TTFT is like that of {name}: ratio",
            "similar",
            band(0.9, 1.1),
            both(partial(_edf_over, runs, under, low)),
            note,
        )
        for under, name, note in (
            ("Medha", "Medha (LARS with space sharing)", ""),
            ("LARS", "LARS without multi-prefill batching", HELD),
        )
    ]
    rows += [
        judge(
            f"Multi-prefill batching: median TTFT of LARS without it over Medha's, {qps:g} QPS",
            "1.6-1.8× (up to 1.8×)",
            band(1.4, 2.2),
            both(partial(_over_medha, runs, "LARS", qps)),
            f"{HELD} With rho_min 0 a long request that is late no longer yields.",
        )
        for qps in runs.qps
    ]
    rows.append(
        judge(
            f"SRPT with the same mechanisms, not in the paper: median TTFT over Medha's at {runs.qps[-1]:g} QPS",
            None,
            at_most(1.0),
            both(lambda mode: runs.ratio("SRPT", "Medha", mode, runs.qps[-1])),
            "Below 1: LARS is not the best order for most requests.",
            approximate=True,
        )
    )
    rows += _beside_the_ladder(runs)
    panels = tuple(
        ReportChart(
            title=f"Median TTFT, {mode} mode",
            x="QPS",
            y="seconds",
            log_y=True,
            lines={policy: _line(runs, policy, mode) for policy in (*POLICIES, *_ours(mode))},
        )
        for mode in MODES
    )
    return ExperimentReport(source=runs.source(), rows=tuple(rows), panels=panels)


def _ours(mode: Mode) -> tuple[str, ...]:
    return ("ladder",) if mode == "default" else ()


def _beside_the_ladder(runs: MedhaStudy) -> list[ClaimRow]:
    """Compare Headway's default with the figure's policies, under the same deadlines; the worst rate counts."""
    about = "The ladder, not in the paper, under the same deadlines, at the rate where it compares worst"
    return [
        judge(
            f"{about}: {words}",
            None,
            rule,
            both(lambda mode, find=find: find(runs) if mode == "default" else None),  # type: ignore[misc]
            approximate=True,
        )
        for words, rule, find in (
            ("share in time over the best of the others'", at_least(0.97), partial(_over_best, metric="in_time")),
            ("long prompts done over the best of the others'", at_least(1.0), partial(_over_best, metric="longs_done")),
            ("P99 TTFT of chats over Medha's", at_most(1.0), _chats_over_medha),
        )
    ]


def _over_best(runs: MedhaStudy, metric: str) -> float | None:
    """Return the least ratio over the rates; None where no policy has any."""

    def share(policy: str, qps: float) -> float:
        return float(median(getattr(result, metric) or 0.0 for result in runs.results(policy, "default", qps)))

    best = {qps: max(share(policy, qps) for policy in POLICIES) for qps in runs.qps}
    return min((share("ladder", qps) / most for qps, most in best.items() if most), default=None)


def _chats_over_medha(runs: MedhaStudy) -> float:
    return max(runs.ratio("ladder", "Medha", "default", qps, "p99", "short_ttft_s") or 0.0 for qps in runs.qps)


def _edf_over(runs: MedhaStudy, under: str, qps: float, mode: Mode) -> float | None:
    return runs.ratio("EDF", under, mode, qps)


def _over_medha(runs: MedhaStudy, policy: str, qps: float, mode: Mode) -> float | None:
    return runs.ratio(policy, "Medha", mode, qps)


def _line(runs: MedhaStudy, policy: str, mode: Mode) -> list[tuple[float, float]]:
    return [(qps, runs.value(policy, mode, qps, "ttft_s", "p50") or 0.0) for qps in runs.qps]
