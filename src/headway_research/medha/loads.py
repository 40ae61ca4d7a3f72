"""Medha Figs. 1, 9, 10 and 14: latencies over the share of long requests and over the rate, under the one setting.

Fig. 1 and §6.4: 0.75 QPS as the share of long requests grows from 0 to 5%. The paper's abstract says P99 where its text
and Fig. 1a say P90 for 174×; P90 is used. Figs. 9 and 10: chats alone (at both ends of the grid only, as nothing there
depends on the order) and with 5% long requests. Fig. 14 (§6.5): LoongServe with two of its eight instances kept for
short prompts, at one rate below and one above what the machine carries.

Sarathi runs as TP8-PP2 with static chunks; Medha-FCFS is Medha without its order; `non-preemptive` is whole prompts in
order of arrival on two instances of TP8. LoongServe has eight instances of TP2; it runs with the first seed, at few
shares, and chats alone in default mode, because its small decode batches are slow to simulate.
"""

from __future__ import annotations

from functools import partial

from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.medha.setting import (
    LONG_SHARE,
    SEEDS,
    STAGES,
    TBT_S,
    AtRate,
    MedhaStudy,
    scenario,
    stage_target_s,
)
from headway_research.verdicts import ascending, at_least, at_most, band, order

QPS = 0.75
LOONG_SHARES = (0.0, 0.01, LONG_SHARE)
SHARES = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)
SYSTEMS = ("Medha", "FCFS", "Sarathi-512", "Sarathi-2048")
POOLED = ("LoongServe", "LoongServe+Reserv", "Medha")
POOL_RATES = (0.75, 1.75)
FIRST = "First seed only."


def fig1(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 1: TTFT at 0.75 QPS over the share of long requests."""
    shares = (0.0, 0.01, 0.05) if options.quick else SHARES
    runs = MedhaStudy(options, seeds=SEEDS)
    first = runs.first_seed
    runs.ensure([("Medha", mode) for mode in MODES] + [("non-preemptive", "default")], [QPS], shares)
    first.ensure([(system, mode) for system in ("LoongServe", "Medha") for mode in MODES], [QPS], LOONG_SHARES)

    def by_share(mode: Mode) -> dict[str, float]:
        return {f"{share:.0%}": runs.value(AtRate("Medha", QPS, share), mode, cut="p90") or 0.0 for share in shares}

    rows = [
        runs.judge(
            "Medha's P90 TTFT at 5% long stays under 10 s",
            "< 10 s",
            at_most(10.0),
            partial(runs.value, AtRate("Medha", QPS), cut="p90"),
            "Longs are themselves 5% of the requests, so that P90 lies among chats.",
        ),
        runs.judge("Medha's P90 TTFT by share of longs, seconds", "grows gracefully", ascending("rises"), by_share),
        *_convoy(first, "LoongServe"),
        *_convoy(runs, "non-preemptive"),
    ]
    studies = {"Medha": (runs, shares), "non-preemptive": (runs, shares), "LoongServe": (first, LOONG_SHARES)}
    panels = tuple(
        runs.chart(
            f"TTFT {cut} at {QPS:g} QPS",
            {
                system: [(share, of.value(AtRate(system, QPS, share), "default", cut=cut)) for share in at]
                for system, (of, at) in studies.items()
            },
            x="share of long requests",
        )
        for cut in ("p50", "p90")
    )
    return ExperimentReport(source=runs.source(), rows=tuple(rows), panels=panels)


def _convoy(runs: MedhaStudy, system: str) -> list[ClaimRow]:
    """Return what a convoy behind long requests costs a system: over itself without any, and over Medha."""
    elastic, name = system == "LoongServe", system[0].upper() + system[1:]
    judge = partial(runs.judge, approximate=not elastic)
    front_end = "One-sided: the paper's TTFT of chats holds a front end that ours lacks."

    def growth(cut: str, share: float, mode: Mode) -> float | None:
        # whole prompts ask nothing that the modes differ in
        whole = not elastic and mode == "paper"
        return None if whole else runs.ratio(AtRate(system, QPS, share), AtRate(system, QPS, 0.0), mode, cut=cut)

    grown = [
        judge(
            f"{name}: {of} TTFT at {share:.0%} over that at 0%",
            paper,
            at_least(low),
            partial(growth, cut, share),
            FIRST if elastic else note,
        )
        for of, cut, share, paper, low, note in (
            ("median", "p50", LONG_SHARE, "30×", 30.0, front_end),
            ("P90", "p90", LONG_SHARE, "174×", 174.0, ""),
            ("P90", "p90", 0.01, "8× (which percentile is not said)", 8.0, ""),
        )
    ]
    return grown + [
        judge(
            f"{name} over Medha, {of} TTFT at 5% long",
            paper,
            at_least(low),
            partial(runs.ratio, AtRate(system, QPS), AtRate("Medha", QPS), cut=cut),
            FIRST if elastic else "",
        )
        for of, cut, paper, low in (("median", "p50", "30×", 30.0), ("P90", "p90", "174×", 174.0))
    ]


class RateSweep:
    """The simulated points of Figs. 9 and 10."""

    def __init__(self, options: RunOptions) -> None:
        self.runs = MedhaStudy(options)
        self.ends = self.low, self.high = self.runs.qps[0], self.runs.qps[-1]
        self.convoy = [qps for qps in self.runs.qps if qps >= 0.75]
        """Rates at which chats wait behind long requests."""
        systems = [(system, mode) for system in SYSTEMS for mode in MODES]
        self.runs.ensure(systems, self.runs.qps, [LONG_SHARE])
        self.runs.ensure(systems, self.ends, [0.0])
        self.first = self.runs.first_seed
        self.first.ensure([("LoongServe", "default")], self.ends, [0.0])
        self.first.ensure([("LoongServe", mode) for mode in MODES], self.convoy, [LONG_SHARE])

    def worst_gap_s(self, system: str, mode: Mode) -> float:
        """Return the P99 over requests of each one's worst gap, at the worst rate."""
        return max(self.runs.value(AtRate(system, qps), mode, "max_tbt_s", "p99") or 0.0 for qps in self.runs.qps)

    def loong_alone(self, metric: str, cut: str, under: AtRate, mode: Mode) -> float | None:
        """Return LoongServe's value at the highest rate over that of another point, chats alone, in default mode."""
        top = AtRate("LoongServe", self.high, 0.0)
        return self.first.ratio(top, under, mode, metric, cut) if mode == "default" else None

    def report(self, rows: list[ClaimRow], metric: str, cut: str, title: str) -> ExperimentReport:
        """Return a figure: a panel of chats alone, one with long requests."""
        panels = tuple(
            self.runs.chart(
                f"{title}, {'5% long' if share else 'chats alone'}, default mode",
                {
                    system: [
                        (qps, self.runs.value(AtRate(system, qps, share), "default", metric, cut)) for qps in rates
                    ]
                    for system in SYSTEMS
                },
            )
            for share, rates in ((0.0, self.ends), (LONG_SHARE, self.runs.qps))
        )
        return ExperimentReport(source=self.runs.source(), rows=tuple(rows), panels=panels)


def fig9(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 9: TTFT over the rate."""
    points = RateSweep(options)
    judge, ratio, low, high = points.runs.judge, points.runs.ratio, points.low, points.high
    medha, sarathi = AtRate("Medha", high, 0.0), ("Sarathi-512", "Sarathi-2048")
    rows = [
        judge(
            f"Chats alone: Medha's P90 TTFT stays consistent, {high:g} over {low:g} QPS",
            "consistent",
            at_most(2.0),
            partial(ratio, medha, AtRate("Medha", low, 0.0), cut="p90"),
        ),
        judge(
            f"Chats alone at {high:g} QPS: TTFT P90 of Sarathi over Medha's (SPP helps)",
            "considerably better than Sarathi",
            order("above 1 for both chunk sizes", lambda found: all(value and value > 1 for value in found.values())),
            lambda mode: {system: ratio(AtRate(system, high, 0.0), medha, mode, cut="p90") for system in sarathi},
        ),
        *(
            judge(
                f"5% long, {qps:g} QPS: median TTFT of {'Medha-FCFS' if system == 'FCFS' else system} over Medha's",
                "degrades quickly (30× at 0.75 QPS is LoongServe's)",
                at_least(30.0),
                partial(ratio, AtRate(system, qps), AtRate("Medha", qps)),
            )
            for qps in points.convoy
            for system in ("FCFS", *sarathi)
        ),
        points.first.judge(
            f"Chats alone: LoongServe's P90 TTFT, {high:g} over {low:g} QPS",
            "increases dramatically",
            at_least(5.0),
            partial(points.loong_alone, "ttft_s", "p90", AtRate("LoongServe", low, 0.0)),
            "Decode batches are packed when prompts want their instances, so that chats alone do not fill eight.",
        ),
        *(
            points.first.judge(
                f"5% long, {qps:g} QPS: median TTFT of LoongServe over Medha's",
                "30× at 0.75 QPS",
                at_least(30.0),
                partial(points.first.ratio, AtRate("LoongServe", qps), AtRate("Medha", qps)),
                FIRST,
            )
            for qps in points.convoy
        ),
        judge(
            "5% long, 1.25 QPS: Medha's median TTFT stays acceptable, seconds",
            "acceptable",
            at_most(5.0),
            partial(points.runs.value, AtRate("Medha", 1.25)),
            "Taken as five seconds at most; the paper gives no number.",
        ),
    ]
    return points.report(rows, "ttft_s", "p50", "median TTFT")


def fig10(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 10: each request's worst gap and mean gap over the rate."""
    points = RateSweep(options)
    judge, gap_s, top = points.runs.judge, points.worst_gap_s, points.high

    def tpot_s(mode: Mode) -> dict[str, float]:
        return {s: points.runs.value(AtRate(s, top), mode, "tpot_s", "p90") or 0.0 for s in ("Medha", "Sarathi-2048")}

    rows = [
        judge(
            f"Medha's worst gap (P99 of requests, any rate) is at most the {TBT_S:g} s aimed at",
            f"{TBT_S:g} s (stages × 20 ms)",
            at_most(TBT_S),
            partial(gap_s, "Medha"),
            "A token that leaves the last stage may find the first one busy with another batch for up to one stage's "
            "time, and then passes all stages: what is aimed at divided by stages + 1 keeps it (default mode), divided "
            "by the stages does not (paper mode).",
        ),
        judge(
            "Medha's worst gap over (stages + 1) × a stage's target",
            None,
            at_most(1.05),
            lambda mode: gap_s("Medha", mode) / ((STAGES + 1) * stage_target_s(mode)),
            "Headway's own bound; links and predictions take up to 5%.",
        ),
        judge(
            "Sarathi-2048's worst gap over Medha's",
            "up to 1 s",
            at_least(5.0),
            lambda mode: gap_s("Sarathi-2048", mode) / max(gap_s("Medha", mode), 1e-9),
        ),
        judge(
            "Sarathi-2048's worst gap, seconds (P99 of requests)",
            "up to 1 s",
            order("0.5 s to 1.5 s", lambda value: 0.5 <= value <= 1.5),
            partial(gap_s, "Sarathi-2048"),
        ),
        judge(
            f"5% long, {top:g} QPS: P90 of TPOT is comparable or better than Sarathi's",
            "comparable or better",
            order("Medha's at most 1.1 × Sarathi-2048's", lambda found: found["Medha"] <= 1.1 * found["Sarathi-2048"]),
            tpot_s,
        ),
        points.first.judge(
            f"Chats alone, {top:g} QPS: median TPOT of LoongServe over Medha's",
            "5×",
            band(4.0, 6.0),
            partial(points.loong_alone, "tpot_s", "p50", AtRate("Medha", top, 0.0)),
            "TP2 beside TP8 × two stages that decode in micro-batches; first seed only.",
        ),
        points.first.judge(
            f"5% long, {top:g} QPS: median TPOT of LoongServe over Medha's",
            "comparable or better for Medha",
            at_least(1 / 1.1),
            partial(points.first.ratio, AtRate("LoongServe", top), AtRate("Medha", top), metric="tpot_s"),
            FIRST,
        ),
    ]
    return points.report(rows, "max_tbt_s", "p99", "worst gap, P99")


def fig14(options: RunOptions) -> ExperimentReport:
    """Reproduce Medha Fig. 14: a pool for short prompts takes them out of the convoy, and leaves fewer instances to
    the long ones."""
    runs = MedhaStudy(options)
    runs.ensure([(system, mode) for system in POOLED for mode in MODES], POOL_RATES, [LONG_SHARE])

    def longs_done(system: str, qps: float, mode: Mode) -> float:
        """Return the share of long requests that were done."""
        return runs.value(AtRate(system, qps), mode, "longs_done") or 0.0

    def fewer(than: str, qps: float, mode: Mode) -> float:
        return longs_done("LoongServe+Reserv", qps, mode) / max(longs_done(than, qps, mode), 1e-9)

    def tpot_s(qps: float, mode: Mode) -> dict[str, float]:
        return {system: runs.value(AtRate(system, qps), mode, "tpot_s") or 0.0 for system in POOLED}

    def blocked(qps: float, mode: Mode) -> float | None:
        return runs.ratio(AtRate("LoongServe", qps), AtRate("LoongServe+Reserv", qps), mode, "short_ttft_s", "p90")

    ordered = order(
        "Medha < with the pool < LoongServe", lambda v: v["Medha"] < v["LoongServe+Reserv"] < v["LoongServe"]
    )
    rows = [
        row
        for qps in POOL_RATES
        for row in (
            runs.judge(
                f"{qps:g} QPS: long requests done with the pool over LoongServe without",
                "10% lower",
                band(0.75, 0.99),
                partial(fewer, "LoongServe", qps),
                "Of those that arrived in the window.",
            ),
            runs.judge(
                f"{qps:g} QPS: long requests done with the pool over Medha's",
                "up to 20% lower",
                band(0.75, 0.99),
                partial(fewer, "Medha", qps),
            ),
            runs.judge(
                f"{qps:g} QPS: median TPOT, seconds",
                "Medha < with the pool < LoongServe",
                ordered,
                partial(tpot_s, qps),
                "Decodes of TP2 instances that share with nobody beside micro-batches of TP8 × two stages with chunks.",
            ),
            runs.judge(
                f"{qps:g} QPS: P90 TTFT of chats, LoongServe's over the pool's",
                "mitigates blocking of short requests",
                at_least(2.0),
                partial(blocked, qps),
            ),
        )
    ]

    def lines(metric: str, cut: str) -> dict[str, list[tuple[float, float | None]]]:
        return {s: [(qps, runs.value(AtRate(s, qps), "default", metric, cut)) for qps in POOL_RATES] for s in POOLED}

    done = {s: [(qps, longs_done(s, qps, "default")) for qps in POOL_RATES] for s in POOLED}
    panels = (
        runs.chart("long requests done, default mode", done, y="share", log_y=False),
        runs.chart("median TPOT, default mode", lines("tpot_s", "p50")),
        runs.chart("P90 TTFT of chats, default mode", lines("short_ttft_s", "p90")),
    )
    ring = "LoongServe's prefills: derived, one TP2 instance's fitted latency on a ring (latency.ring); decodes: fitted"
    shown = scenario("LoongServe+Reserv", "default", POOL_RATES[-1], LONG_SHARE, runs.window_s)
    source = runs.source(latency_loongserve=ring, loongserve_as_scenario_file=shown)
    return ExperimentReport(source=source, rows=tuple(rows), panels=panels)
