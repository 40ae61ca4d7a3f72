"""Medha Figs. 9 and 10: TTFT and decode latency over the rate, chats alone and with 5% long requests.

Under the one setting. Sarathi runs as TP8-PP2 with static chunks; Medha-FCFS is Medha without its order. LoongServe
proper belongs to several instances and is not here.
"""

from __future__ import annotations

from functools import partial

from headway.experiments.base import MODES, Mode, Options, Panel, Report
from headway.experiments.medha_setting import LONG_SHARE, STAGES, T_TARGET_S, Runs
from headway.experiments.verdicts import at_least, at_most, both, judge, order

SYSTEMS = ("Medha", "FCFS", "Sarathi-512", "Sarathi-2048")
SHARES = (0.0, LONG_SHARE)


def _runs(options: Options) -> Runs:
    runs = Runs(options)
    runs.need([(system, mode) for system in SYSTEMS for mode in MODES], runs.qps, SHARES)
    return runs


def fig9(options: Options) -> Report:
    """TTFT."""
    runs = _runs(options)
    low, high = runs.qps[0], runs.qps[-1]

    def cut(system: str, qps: float, name: str, share: float, mode: Mode) -> float | None:
        return runs.value(system, mode, qps, "ttft_s", name, share)

    def grown(mode: Mode) -> float:
        return (cut("Medha", high, "p90", 0.0, mode) or 0.0) / (cut("Medha", low, "p90", 0.0, mode) or 1.0)

    def against(system: str, name: str, qps: float, share: float, mode: Mode) -> float:
        return (cut(system, qps, name, share, mode) or 0.0) / (cut("Medha", qps, name, share, mode) or 1.0)

    rows = [
        judge(
            f"Chats alone: Medha's P90 TTFT stays consistent, {high:g} over {low:g} QPS",
            "consistent",
            at_most(2.0),
            both(grown),
        ),
        judge(
            f"Chats alone at {high:g} QPS: TTFT P90 of Sarathi over Medha's (SPP helps)",
            "considerably better than Sarathi",
            order(
                "above 1 for both chunk sizes",
                lambda found: all(value is not None and value > 1 for value in found.values()),
            ),
            both(lambda mode: {s: against(s, "p90", high, 0.0, mode) for s in ("Sarathi-512", "Sarathi-2048")}),
        ),
    ]
    rows += [
        judge(
            f"5% long, {qps:g} QPS: median TTFT of {name} over Medha's",
            "degrades quickly (30× at 0.75 QPS is LoongServe's)",
            at_least(30.0),
            both(partial(against, system, "p50", qps, LONG_SHARE)),
        )
        for qps in runs.qps
        if qps >= 0.75
        for system, name in (("FCFS", "Medha-FCFS"), ("Sarathi-512", "Sarathi-512"), ("Sarathi-2048", "Sarathi-2048"))
    ]
    rows.append(
        judge(
            "5% long, 1.25 QPS: Medha's median TTFT stays acceptable, seconds",
            "acceptable",
            at_most(5.0),
            both(partial(cut, "Medha", 1.25, "p50", LONG_SHARE)),
            "Taken as five seconds at most; the paper gives no number.",
        )
    )
    return Report(source=runs.source(), rows=tuple(rows), panels=_panels(runs, "ttft_s", "p50", "median TTFT"))


def fig10(options: Options) -> Report:
    """Decode latency: the worst gap of each request, and the mean gap."""
    runs = _runs(options)

    def worst(system: str, mode: Mode) -> float:
        return max(runs.value(system, mode, qps, "max_tbt_s", "p99") or 0.0 for qps in runs.qps)

    bound = STAGES * T_TARGET_S
    tpot = {
        mode: {s: runs.value(s, mode, runs.qps[-1], "tpot_s", "p90") or 0.0 for s in ("Medha", "Sarathi-2048")}
        for mode in MODES
    }
    rows = [
        judge(
            f"Medha's worst gap (P99 of requests, any rate) is at most stages × target = {bound:g} s",
            f"{bound:g} s (from 20 ms a stage)",
            at_most(bound),
            both(partial(worst, "Medha")),
            "A decode whose token leaves the last stage may find the first stage busy with another batch for up to one "
            "target more: with unequal batches the bound is (stages + 1) × target and the links.",
        ),
        judge(
            f"Medha's worst gap is at most (stages + 1) × target and 5% = {1.05 * (bound + T_TARGET_S):g} s",
            "-",
            at_most(1.05 * (bound + T_TARGET_S)),
            both(partial(worst, "Medha")),
            "Headway's own bound.",
        ),
        judge(
            "Sarathi-2048's worst gap over Medha's",
            "up to 1 s",
            at_least(5.0),
            both(lambda mode: worst("Sarathi-2048", mode) / max(worst("Medha", mode), 1e-9)),
        ),
        judge(
            "Sarathi-2048's worst gap, seconds (P99 of requests)",
            "up to 1 s",
            order("0.5 s to 1.5 s", lambda value: 0.5 <= value <= 1.5),
            both(partial(worst, "Sarathi-2048")),
        ),
        judge(
            f"5% long, {runs.qps[-1]:g} QPS: P90 of TPOT is comparable or better than Sarathi's",
            "comparable or better",
            order("Medha's at most 1.1 × Sarathi-2048's", lambda found: found["Medha"] <= 1.1 * found["Sarathi-2048"]),
            tpot,
        ),
    ]
    return Report(source=runs.source(), rows=tuple(rows), panels=_panels(runs, "max_tbt_s", "p99", "worst gap, P99"))


def _panels(runs: Runs, metric: str, cut: str, title: str) -> tuple[Panel, ...]:
    return tuple(
        Panel(
            title=f"{title}, {'5% long' if share else 'chats alone'}, default mode",
            x="QPS",
            y="seconds",
            log_y=True,
            lines={
                system: [(qps, runs.value(system, "default", qps, metric, cut, share) or 0.0) for qps in runs.qps]
                for system in SYSTEMS
            },
        )
        for share in SHARES
    )
