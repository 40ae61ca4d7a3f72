"""Medha Figs. 9 and 10: TTFT and decode latency over the rate, chats alone and with 5% long requests.

Under the one setting. Sarathi runs as TP8-PP2 with static chunks; Medha-FCFS is Medha without its order. LoongServe has
eight instances of TP2; it runs with the first seed, and chats alone in default mode, because its small decode batches
are slow to simulate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.setting import LONG_SHARE, SEEDS, STAGES, TBT_S, MedhaStudy, stage_target_s
from headway_research.verdicts import at_least, at_most, band, order

SYSTEMS = ("Medha", "FCFS", "Sarathi-512", "Sarathi-2048")
SHARES = (0.0, LONG_SHARE)


class RateSweep:
    """The simulated points of both figures: latencies by system, mode, rate and share of long requests."""

    def __init__(self, options: RunOptions) -> None:
        self.study = MedhaStudy(options, seeds=SEEDS[:1])
        self.low, self.high = self.study.qps[0], self.study.qps[-1]
        systems = [(system, mode) for system in SYSTEMS for mode in MODES]
        self.study.ensure(systems, self.study.qps, [LONG_SHARE])
        self.study.ensure(systems, self.rates(0.0), [0.0])
        # LoongServe's small decode batches are slow to simulate: first seed only
        self.first_seed = MedhaStudy(replace(options, seeds=self.study.seeds[:1]))
        self.first_seed.ensure([("LoongServe", "default")], self.rates(0.0), [0.0])
        self.first_seed.ensure([("LoongServe", mode) for mode in MODES], self.convoy_rates, [LONG_SHARE])

    def rates(self, share: float) -> tuple[float, ...]:
        """Return the simulated rates. Chats alone: the ends only, as nothing there depends on the order."""
        return self.study.qps if share else (self.low, self.high)

    @property
    def convoy_rates(self) -> tuple[float, ...]:
        """Rates at which chats wait behind long requests."""
        return tuple(qps for qps in self.study.qps if qps >= 0.75)

    def ttft_s(self, system: str, qps: float, cut: str, share: float, mode: Mode) -> float | None:
        return self.study.value(system, mode, qps, "ttft_s", cut, share)

    def medha_growth(self, mode: Mode) -> float:
        """Return Medha's P90 TTFT at the highest rate over that at the lowest, chats alone."""
        high_s, low_s = (self.ttft_s("Medha", qps, "p90", 0.0, mode) for qps in (self.high, self.low))
        return (high_s or 0.0) / (low_s or 1.0)

    def over_medha(self, system: str, cut: str, qps: float, share: float, mode: Mode) -> float:
        """Return a system's TTFT over Medha's."""
        mine_s, medha_s = (self.ttft_s(name, qps, cut, share, mode) for name in (system, "Medha"))
        return (mine_s or 0.0) / (medha_s or 1.0)

    def loong_growth(self) -> float:
        """Return LoongServe's P90 TTFT at the highest rate over that at the lowest, chats alone, first seed only."""
        value = self.first_seed.value
        high_s, low_s = (value("LoongServe", "default", qps, "ttft_s", "p90", 0.0) for qps in (self.high, self.low))
        return (high_s or 0.0) / (low_s or 1.0)

    def loong_over_medha(self, metric: str, qps: float, share: float, mode: Mode) -> float:
        """Return the median of a metric of LoongServe over Medha's, first seed only."""
        mine_s, medha_s = (
            self.first_seed.value(name, mode, qps, metric, "p50", share) or 0.0 for name in ("LoongServe", "Medha")
        )
        return mine_s / (medha_s or 1.0)

    def worst_gap_s(self, system: str, mode: Mode) -> float:
        """Return the P99 over requests of each one's worst gap, at the worst rate."""
        return max(self.study.value(system, mode, qps, "max_tbt_s", "p99") or 0.0 for qps in self.study.qps)

    def gap_over_bound(self, mode: Mode) -> float:
        return self.worst_gap_s("Medha", mode) / ((STAGES + 1) * stage_target_s(mode))

    def sarathi_gap_over_medha(self, mode: Mode) -> float:
        return self.worst_gap_s("Sarathi-2048", mode) / max(self.worst_gap_s("Medha", mode), 1e-9)

    def tpot_s(self, mode: Mode) -> dict[str, float]:
        """Return the P90 of TPOT by system, 5% long, at the highest rate."""
        systems = ("Medha", "Sarathi-2048")
        return {system: self.study.value(system, mode, self.high, "tpot_s", "p90") or 0.0 for system in systems}


def _chats_alone(value: Callable[[], Any]) -> Callable[[Mode], Any]:
    """Return a value that the modes do not differ in, in default mode only."""
    return lambda mode: value() if mode == "default" else None


def fig9(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 9: TTFT over the rate."""
    points = RateSweep(options)
    acceptable = points.study.judge(
        "5% long, 1.25 QPS: Medha's median TTFT stays acceptable, seconds",
        "acceptable",
        at_most(5.0),
        partial(points.ttft_s, "Medha", 1.25, "p50", LONG_SHARE),
        "Taken as five seconds at most; the paper gives no number.",
    )
    return ExperimentReport(
        source=points.study.source(),
        rows=(*_ttft_alone(points), *_ttft_beside_longs(points), *_loong_ttft(points), acceptable),
        panels=_panels(points, "ttft_s", "p50", "median TTFT"),
    )


def _ttft_alone(points: RateSweep) -> list[ClaimRow]:
    high, low = points.high, points.low
    return [
        points.study.judge(
            f"Chats alone: Medha's P90 TTFT stays consistent, {high:g} over {low:g} QPS",
            "consistent",
            at_most(2.0),
            points.medha_growth,
        ),
        points.study.judge(
            f"Chats alone at {high:g} QPS: TTFT P90 of Sarathi over Medha's (SPP helps)",
            "considerably better than Sarathi",
            order(
                "above 1 for both chunk sizes",
                lambda found: all(value is not None and value > 1 for value in found.values()),
            ),
            lambda mode: {s: points.over_medha(s, "p90", high, 0.0, mode) for s in ("Sarathi-512", "Sarathi-2048")},
        ),
    ]


def _ttft_beside_longs(points: RateSweep) -> list[ClaimRow]:
    return [
        points.study.judge(
            f"5% long, {qps:g} QPS: median TTFT of {name} over Medha's",
            "degrades quickly (30× at 0.75 QPS is LoongServe's)",
            at_least(30.0),
            partial(points.over_medha, system, "p50", qps, LONG_SHARE),
        )
        for qps in points.convoy_rates
        for system, name in (("FCFS", "Medha-FCFS"), ("Sarathi-512", "Sarathi-512"), ("Sarathi-2048", "Sarathi-2048"))
    ]


def _loong_ttft(points: RateSweep) -> list[ClaimRow]:
    alone = points.first_seed.judge(
        f"Chats alone: LoongServe's P90 TTFT, {points.high:g} over {points.low:g} QPS",
        "increases dramatically",
        at_least(5.0),
        _chats_alone(points.loong_growth),
        "Decode batches are packed when prompts want their instances, so that chats alone do not fill eight.",
    )
    return [
        alone,
        *(
            points.first_seed.judge(
                f"5% long, {qps:g} QPS: median TTFT of LoongServe over Medha's",
                "30× at 0.75 QPS",
                at_least(30.0),
                partial(points.loong_over_medha, "ttft_s", qps, LONG_SHARE),
                "First seed only.",
            )
            for qps in points.convoy_rates
        ),
    ]


def fig10(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 10: each request's worst gap and mean gap over the rate."""
    points = RateSweep(options)
    return ExperimentReport(
        source=points.study.source(),
        rows=(*_gaps(points), *_tpots(points)),
        panels=_panels(points, "max_tbt_s", "p99", "worst gap, P99"),
    )


def _gaps(points: RateSweep) -> list[ClaimRow]:
    judge = points.study.judge
    return [
        judge(
            f"Medha's worst gap (P99 of requests, any rate) is at most the {TBT_S:g} s aimed at",
            f"{TBT_S:g} s (stages × 20 ms)",
            at_most(TBT_S),
            partial(points.worst_gap_s, "Medha"),
            "A token that leaves the last stage may find the first one busy with another batch for up to one stage's "
            "time, and then passes all stages: what is aimed at divided by stages + 1 keeps it (default mode), divided "
            "by the stages does not (paper mode).",
        ),
        judge(
            "Medha's worst gap over (stages + 1) × a stage's target",
            None,
            at_most(1.05),
            points.gap_over_bound,
            "Headway's own bound; links and predictions take up to 5%.",
        ),
        judge(
            "Sarathi-2048's worst gap over Medha's",
            "up to 1 s",
            at_least(5.0),
            points.sarathi_gap_over_medha,
        ),
        judge(
            "Sarathi-2048's worst gap, seconds (P99 of requests)",
            "up to 1 s",
            order("0.5 s to 1.5 s", lambda value: 0.5 <= value <= 1.5),
            partial(points.worst_gap_s, "Sarathi-2048"),
        ),
    ]


def _tpots(points: RateSweep) -> list[ClaimRow]:
    top = points.high
    return [
        points.study.judge(
            f"5% long, {top:g} QPS: P90 of TPOT is comparable or better than Sarathi's",
            "comparable or better",
            order("Medha's at most 1.1 × Sarathi-2048's", lambda found: found["Medha"] <= 1.1 * found["Sarathi-2048"]),
            points.tpot_s,
        ),
        points.first_seed.judge(
            f"Chats alone, {top:g} QPS: median TPOT of LoongServe over Medha's",
            "5×",
            band(4.0, 6.0),
            _chats_alone(lambda: points.loong_over_medha("tpot_s", top, 0.0, "default")),
            "TP2 beside TP8 × two stages that decode in micro-batches; first seed only.",
        ),
        points.first_seed.judge(
            f"5% long, {top:g} QPS: median TPOT of LoongServe over Medha's",
            "comparable or better for Medha",
            at_least(1 / 1.1),
            partial(points.loong_over_medha, "tpot_s", top, LONG_SHARE),
            "First seed only.",
        ),
    ]


def _panels(points: RateSweep, metric: str, cut: str, title: str) -> tuple[ReportChart, ...]:
    def line(system: str, share: float) -> list[tuple[float, float]]:
        value = points.study.value
        return [(qps, value(system, "default", qps, metric, cut, share) or 0.0) for qps in points.rates(share)]

    return tuple(
        ReportChart(
            title=f"{title}, {'5% long' if share else 'chats alone'}, default mode",
            x="QPS",
            y="seconds",
            log_y=True,
            lines={system: line(system, share) for system in SYSTEMS},
        )
        for share in SHARES
    )
