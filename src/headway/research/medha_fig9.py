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

from headway.research.base import MODES, ExperimentReport, Mode, PlotPanel, RunOptions
from headway.research.medha_setting import LONG_SHARE, STAGES, TBT_S, MedhaStudy, stage_target_s
from headway.research.verdicts import at_least, at_most, band, order

SYSTEMS = ("Medha", "FCFS", "Sarathi-512", "Sarathi-2048")
SHARES = (0.0, LONG_SHARE)


def _runs(options: RunOptions) -> MedhaStudy:
    """Chats alone at the ends of the rates only: nothing there depends on the order."""
    runs = MedhaStudy(options)
    systems = [(system, mode) for system in SYSTEMS for mode in MODES]
    runs.need(systems, runs.qps, [LONG_SHARE])
    runs.need(systems, _rates(runs, 0.0), [0.0])
    return runs


def _loong(options: RunOptions, runs: MedhaStudy) -> MedhaStudy:
    """LoongServe beside Medha, the first seed's."""
    first = MedhaStudy(replace(options, seeds=runs.seeds[:1]))
    first.need([("LoongServe", "default")], _rates(runs, 0.0), [0.0])
    first.need([("LoongServe", mode) for mode in MODES], _long_rates(runs), [LONG_SHARE])
    return first


def _long_rates(runs: MedhaStudy) -> tuple[float, ...]:
    return tuple(qps for qps in runs.qps if qps >= 0.75)


def _chats_alone(value: Callable[[], Any]) -> Callable[[Mode], Any]:
    """What the modes do not differ in."""
    return lambda mode: value() if mode == "default" else None


def _rates(runs: MedhaStudy, share: float) -> tuple[float, ...]:
    return runs.qps if share else (runs.qps[0], runs.qps[-1])


def fig9(options: RunOptions) -> ExperimentReport:
    """TTFT."""
    runs = _runs(options)
    first = _loong(options, runs)
    low, high = runs.qps[0], runs.qps[-1]

    def cut(system: str, qps: float, name: str, share: float, mode: Mode) -> float | None:
        return runs.value(system, mode, qps, "ttft_s", name, share)

    def grown(mode: Mode) -> float:
        return (cut("Medha", high, "p90", 0.0, mode) or 0.0) / (cut("Medha", low, "p90", 0.0, mode) or 1.0)

    def against(system: str, name: str, qps: float, share: float, mode: Mode) -> float:
        return (cut(system, qps, name, share, mode) or 0.0) / (cut("Medha", qps, name, share, mode) or 1.0)

    rows = [
        runs.judge(
            f"Chats alone: Medha's P90 TTFT stays consistent, {high:g} over {low:g} QPS",
            "consistent",
            at_most(2.0),
            grown,
        ),
        runs.judge(
            f"Chats alone at {high:g} QPS: TTFT P90 of Sarathi over Medha's (SPP helps)",
            "considerably better than Sarathi",
            order(
                "above 1 for both chunk sizes",
                lambda found: all(value is not None and value > 1 for value in found.values()),
            ),
            lambda mode: {s: against(s, "p90", high, 0.0, mode) for s in ("Sarathi-512", "Sarathi-2048")},
        ),
    ]
    rows += [
        runs.judge(
            f"5% long, {qps:g} QPS: median TTFT of {name} over Medha's",
            "degrades quickly (30× at 0.75 QPS is LoongServe's)",
            at_least(30.0),
            partial(against, system, "p50", qps, LONG_SHARE),
        )
        for qps in runs.qps
        if qps >= 0.75
        for system, name in (("FCFS", "Medha-FCFS"), ("Sarathi-512", "Sarathi-512"), ("Sarathi-2048", "Sarathi-2048"))
    ]

    def loong(qps: float, name: str, share: float, mode: Mode) -> float:
        return first.value("LoongServe", mode, qps, "ttft_s", name, share) or 0.0

    def loong_over(qps: float, mode: Mode) -> float:
        return loong(qps, "p50", LONG_SHARE, mode) / (first.value("Medha", mode, qps, "ttft_s", "p50") or 1.0)

    rows.append(
        first.judge(
            f"Chats alone: LoongServe's P90 TTFT, {high:g} over {low:g} QPS",
            "increases dramatically",
            at_least(5.0),
            _chats_alone(lambda: loong(high, "p90", 0.0, "default") / (loong(low, "p90", 0.0, "default") or 1.0)),
            "Decode batches are packed when prompts want their instances, so that chats alone do not fill eight.",
        )
    )
    rows += [
        first.judge(
            f"5% long, {qps:g} QPS: median TTFT of LoongServe over Medha's",
            "30× at 0.75 QPS",
            at_least(30.0),
            partial(loong_over, qps),
            "First seed only.",
        )
        for qps in _long_rates(runs)
    ]
    rows.append(
        runs.judge(
            "5% long, 1.25 QPS: Medha's median TTFT stays acceptable, seconds",
            "acceptable",
            at_most(5.0),
            partial(cut, "Medha", 1.25, "p50", LONG_SHARE),
            "Taken as five seconds at most; the paper gives no number.",
        )
    )
    return ExperimentReport(
        source=runs.source(), rows=tuple(rows), panels=_panels(runs, "ttft_s", "p50", "median TTFT")
    )


def fig10(options: RunOptions) -> ExperimentReport:
    """Decode latency: the worst gap of each request, and the mean gap."""
    runs = _runs(options)
    first = _loong(options, runs)

    def worst(system: str, mode: Mode) -> float:
        return max(runs.value(system, mode, qps, "max_tbt_s", "p99") or 0.0 for qps in runs.qps)

    def tpot(mode: Mode) -> dict[str, float]:
        systems = ("Medha", "Sarathi-2048")
        return {system: runs.value(system, mode, runs.qps[-1], "tpot_s", "p90") or 0.0 for system in systems}

    def over_bound(mode: Mode) -> float:
        return worst("Medha", mode) / ((STAGES + 1) * stage_target_s(mode))

    rows = [
        runs.judge(
            f"Medha's worst gap (P99 of requests, any rate) is at most the {TBT_S:g} s aimed at",
            f"{TBT_S:g} s (stages × 20 ms)",
            at_most(TBT_S),
            partial(worst, "Medha"),
            "A token that leaves the last stage may find the first one busy with another batch for up to one stage's "
            "time, and then passes all stages: what is aimed at divided by stages + 1 keeps it (default mode), divided "
            "by the stages does not (paper mode).",
        ),
        runs.judge(
            "Medha's worst gap over (stages + 1) × a stage's target",
            "-",
            at_most(1.05),
            over_bound,
            "Headway's own bound; links and predictions take up to 5%.",
        ),
        runs.judge(
            "Sarathi-2048's worst gap over Medha's",
            "up to 1 s",
            at_least(5.0),
            lambda mode: worst("Sarathi-2048", mode) / max(worst("Medha", mode), 1e-9),
        ),
        runs.judge(
            "Sarathi-2048's worst gap, seconds (P99 of requests)",
            "up to 1 s",
            order("0.5 s to 1.5 s", lambda value: 0.5 <= value <= 1.5),
            partial(worst, "Sarathi-2048"),
        ),
        runs.judge(
            f"5% long, {runs.qps[-1]:g} QPS: P90 of TPOT is comparable or better than Sarathi's",
            "comparable or better",
            order("Medha's at most 1.1 × Sarathi-2048's", lambda found: found["Medha"] <= 1.1 * found["Sarathi-2048"]),
            tpot,
        ),
    ]

    def loong_tpot(qps: float, share: float, mode: Mode) -> float:
        mine, medha = (first.value(s, mode, qps, "tpot_s", "p50", share) or 0.0 for s in ("LoongServe", "Medha"))
        return mine / (medha or 1.0)

    top = runs.qps[-1]
    rows += [
        first.judge(
            f"Chats alone, {top:g} QPS: median TPOT of LoongServe over Medha's",
            "5×",
            band(4.0, 6.0),
            _chats_alone(lambda: loong_tpot(top, 0.0, "default")),
            "TP2 beside TP8 × two stages that decode in micro-batches; first seed only.",
        ),
        first.judge(
            f"5% long, {top:g} QPS: median TPOT of LoongServe over Medha's",
            "comparable or better for Medha",
            at_least(1 / 1.1),
            partial(loong_tpot, top, LONG_SHARE),
            "First seed only.",
        ),
    ]
    return ExperimentReport(
        source=runs.source(), rows=tuple(rows), panels=_panels(runs, "max_tbt_s", "p99", "worst gap, P99")
    )


def _panels(runs: MedhaStudy, metric: str, cut: str, title: str) -> tuple[PlotPanel, ...]:
    return tuple(
        PlotPanel(
            title=f"{title}, {'5% long' if share else 'chats alone'}, default mode",
            x="QPS",
            y="seconds",
            log_y=True,
            lines={
                system: [(q, runs.value(system, "default", q, metric, cut, share) or 0.0) for q in _rates(runs, share)]
                for system in SYSTEMS
            },
        )
        for share in SHARES
    )
