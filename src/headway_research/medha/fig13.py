"""Medha Fig. 13 and §6.4: effect of the order of prefills and of multi-prefill batching, under the one setting.

The figure shows CDFs of TTFT; its claims are ratios of medians. Not in the paper, and beside the others: SRPT, because
it beats LARS on most requests, and the ladder, because it is Headway's default. The paper's gain of multi-prefill
batching (1.6-1.8×) rests on a deadline that it does not define; ours is reported at each rate as it comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

from headway_research.base import MODES, ExperimentReport, Mode, RunOptions
from headway_research.medha.setting import LONG_SHARE, At, MedhaStudy
from headway_research.verdicts import at_least, at_most, band, judge, only

POLICIES = ("FCFS", "EDF", "LRS", "SRPT", "LARS", "Medha")
COLLAPSE = 30.0
HELD = "LARS alone holds a chat back until it is nearly late: its deadline of a second is a hundred times its work."


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""
    runs = MedhaStudy(options)
    systems: dict[Mode, tuple[str, ...]] = {"paper": POLICIES, "default": (*POLICIES, "ladder")}
    runs.ensure([(policy, mode) for mode in MODES for policy in systems[mode]], runs.qps, [LONG_SHARE])
    low, high = runs.qps[0], runs.qps[-1]

    def over_medha(policy: str, qps: float) -> Callable[..., float | None]:
        return partial(runs.ratio, At(policy, qps), At("Medha", qps))

    rows = [
        runs.judge(
            f"{policy}'s median TTFT over Medha's at {qps:g} QPS",
            "collapses as FCFS does; 30× at high load",
            at_least(COLLAPSE),
            over_medha(policy, qps),
        )
        for qps in runs.qps
        if qps >= 1.25
        for policy in ("FCFS", "EDF", "LRS")
    ]
    rows += [
        runs.judge(
            f"At {low:g} QPS EDF's median TTFT is like that of {name}: ratio",
            "similar",
            band(0.9, 1.1),
            partial(runs.ratio, At("EDF", low), At(under, low)),
            note,
        )
        for under, name, note in (
            ("Medha", "Medha (LARS with space sharing)", ""),
            ("LARS", "LARS without multi-prefill batching", HELD),
        )
    ]
    rows += [
        runs.judge(
            f"Multi-prefill batching: median TTFT of LARS without it over Medha's, {qps:g} QPS",
            "1.6-1.8× (up to 1.8×)",
            band(1.4, 2.2),
            over_medha("LARS", qps),
            f"{HELD} With rho_min 0 a long request that is late no longer yields.",
        )
        for qps in runs.qps
    ]
    rows.append(
        runs.judge(
            f"SRPT with the same mechanisms, not in the paper: median TTFT over Medha's at {high:g} QPS",
            None,
            at_most(1.0),
            over_medha("SRPT", high),
            "Below 1: LARS is not the best order for most requests.",
            approximate=True,
        )
    )
    # Headway's default beside the figure's policies
    about = "The ladder, not in the paper, under the same deadlines, at the rate where it compares worst"
    chats = (runs.ratio(At("ladder", q), At("Medha", q), "default", "short_ttft_s", "p99") for q in runs.qps)
    rows += [
        judge(f"{about}: {words}", None, rule, only("default", value), approximate=True)
        for words, rule, value in (
            ("share in time over the best of the others'", at_least(0.97), _over_best(runs, "in_time")),
            ("long prompts done over the best of the others'", at_least(1.0), _over_best(runs, "longs_done")),
            ("P99 TTFT of chats over Medha's", at_most(1.0), max(ratio or 0.0 for ratio in chats)),
        )
    ]
    panels = tuple(
        runs.chart(
            f"Median TTFT, {mode} mode",
            {policy: [(qps, runs.value(At(policy, qps), mode)) for qps in runs.qps] for policy in systems[mode]},
        )
        for mode in MODES
    )
    return ExperimentReport(source=runs.source(), rows=tuple(rows), panels=panels)


def _over_best(runs: MedhaStudy, metric: str) -> float | None:
    """Return the ladder's least ratio over the rates to the best policy; None where no policy has any."""

    def share(policy: str, qps: float) -> float:
        return float(median(getattr(m, metric) or 0.0 for m in runs.results(At(policy, qps), "default")))

    best = {qps: max(share(policy, qps) for policy in POLICIES) for qps in runs.qps}
    return min((share("ladder", qps) / most for qps, most in best.items() if most), default=None)
