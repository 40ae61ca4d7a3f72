"""Medha Fig. 1 and §6.4's sensitivity: TTFT at 0.75 QPS as the share of long requests grows from 0 to 5%.

LoongServe runs with the first seed and at three shares only, because its small decode batches are slow to simulate.
`non-preemptive` (whole prompts in order of arrival on two instances of TP8) stands beside it over all shares and seeds.
The paper's abstract says P99 where its text and Fig. 1a say P90 for 174×; P90 is used.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.setting import LONG_SHARE, MedhaStudy
from headway_research.verdicts import ascending, at_least, at_most

QPS = 0.75
LOONG_SHARES = (0.0, 0.01, LONG_SHARE)
LOONG_NOTE = "First seed only."
SHARES = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)


class TtftByShare:
    """The simulated points of the figure: TTFT by system, mode and share of long requests."""

    def __init__(self, options: RunOptions) -> None:
        self.shares = (0.0, 0.01, 0.05) if options.quick else SHARES
        self.study = MedhaStudy(options)
        self.study.ensure([("Medha", mode) for mode in MODES] + [("non-preemptive", "default")], [QPS], self.shares)
        self.first_seed = MedhaStudy(replace(options, seeds=self.study.seeds[:1]))
        self.first_seed.ensure(
            [(system, mode) for system in ("LoongServe", "Medha") for mode in MODES], [QPS], LOONG_SHARES
        )

    def ttft_s(self, system: str, cut: str, share: float, mode: Mode) -> float:
        """Return TTFT in seconds over all seeds; `cut` names a percentile."""
        return self.study.value(system, mode, QPS, "ttft_s", cut, share) or 0.0

    def medha_s(self, mode: Mode) -> dict[str, float]:
        """Return Medha's P90 TTFT by share of long requests."""
        return {f"{share:.0%}": self.ttft_s("Medha", "p90", share, mode) for share in self.shares}

    def growth(self, cut: str, share: float, mode: Mode) -> float | None:
        """Return the non-preemptive system's TTFT at a share over that without long requests."""
        if mode == "paper":  # whole prompts ask nothing that the modes differ in
            return None
        return self.ttft_s("non-preemptive", cut, share, mode) / max(
            self.ttft_s("non-preemptive", cut, 0.0, mode), 1e-9
        )

    def over_medha(self, cut: str, mode: Mode) -> float:
        """Return the non-preemptive system's TTFT over Medha's at 5% long."""
        medha_s = max(self.ttft_s("Medha", cut, LONG_SHARE, mode), 1e-9)
        return self.ttft_s("non-preemptive", cut, LONG_SHARE, "default") / medha_s

    def loong_s(self, cut: str, share: float, mode: Mode) -> float:
        """Return LoongServe's TTFT in seconds, first seed only."""
        return self.first_seed.value("LoongServe", mode, QPS, "ttft_s", cut, share) or 0.0

    def loong_growth(self, cut: str, share: float, mode: Mode) -> float:
        """Return LoongServe's TTFT at a share over that without long requests."""
        return self.loong_s(cut, share, mode) / max(self.loong_s(cut, 0.0, mode), 1e-9)

    def loong_over_medha(self, cut: str, mode: Mode) -> float:
        """Return LoongServe's TTFT over Medha's at 5% long, first seed only."""
        medha_s = self.first_seed.value("Medha", mode, QPS, "ttft_s", cut, LONG_SHARE) or 0.0
        return self.loong_s(cut, LONG_SHARE, mode) / max(medha_s, 1e-9)


def run(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 1."""
    points = TtftByShare(options)
    return ExperimentReport(
        source=points.study.source(),
        rows=(*_medha_rows(points), *_loong_rows(points), *_non_preemptive_rows(points)),
        panels=tuple(_panel(points, cut) for cut in ("p50", "p90")),
    )


def _medha_rows(points: TtftByShare) -> list[ClaimRow]:
    return [
        points.study.judge(
            "Medha's P90 TTFT at 5% long stays under 10 s",
            "< 10 s",
            at_most(10.0),
            partial(points.ttft_s, "Medha", "p90", LONG_SHARE),
            "Longs are themselves 5% of the requests, so that P90 lies among chats.",
        ),
        points.study.judge(
            "Medha's P90 TTFT by share of longs, seconds", "grows gracefully", ascending("rises"), points.medha_s
        ),
    ]


def _loong_rows(points: TtftByShare) -> list[ClaimRow]:
    judge = points.first_seed.judge
    growth = [
        judge(
            f"LoongServe: {of} TTFT at {share:.0%} over that at 0%",
            paper,
            at_least(low),
            partial(points.loong_growth, cut, share),
            LOONG_NOTE,
        )
        for of, cut, share, paper, low in (
            ("median", "p50", LONG_SHARE, "30×", 30.0),
            ("P90", "p90", LONG_SHARE, "174×", 174.0),
            ("P90", "p90", 0.01, "8× (which percentile is not said)", 8.0),
        )
    ]
    over_medha = [
        judge(
            f"LoongServe over Medha, {of} TTFT at 5% long",
            paper,
            at_least(low),
            partial(points.loong_over_medha, cut),
            LOONG_NOTE,
        )
        for of, cut, paper, low in (("median", "p50", "30×", 30.0), ("P90", "p90", "174×", 174.0))
    ]
    return growth + over_medha


def _non_preemptive_rows(points: TtftByShare) -> list[ClaimRow]:
    judge = partial(points.study.judge, approximate=True)
    front_end = "One-sided: the paper's TTFT of chats holds a front end that ours lacks."
    growth = [
        judge(
            f"Non-preemptive: {of} TTFT at {share:.0%} over that at 0%",
            paper,
            at_least(low),
            partial(points.growth, cut, share),
            note,
        )
        for of, cut, share, paper, low, note in (
            ("median", "p50", LONG_SHARE, "30×", 30.0, front_end),
            ("P90", "p90", LONG_SHARE, "174×", 174.0, ""),
            ("P90", "p90", 0.01, "8× (which percentile is not said)", 8.0, ""),
        )
    ]
    over_medha = [
        judge(f"Non-preemptive over Medha, {of} TTFT at 5% long", paper, at_least(low), partial(points.over_medha, cut))
        for of, cut, paper, low in (("median", "p50", "30×", 30.0), ("P90", "p90", "174×", 174.0))
    ]
    return growth + over_medha


def _panel(points: TtftByShare, cut: str) -> ReportChart:
    lines = {
        system: [(share, points.ttft_s(system, cut, share, "default")) for share in points.shares]
        for system in ("Medha", "non-preemptive")
    }
    lines["LoongServe"] = [(share, points.loong_s(cut, share, "default")) for share in LOONG_SHARES]
    return ReportChart(
        title=f"TTFT {cut} at {QPS:g} QPS", x="share of long requests", y="seconds", log_y=True, lines=lines
    )
