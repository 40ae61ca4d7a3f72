"""Medha Fig. 13 and §6.4: effect of the order of prefills and of multi-prefill batching, under the one setting.

The figure shows CDFs of TTFT; its claims are ratios of medians. Not in the paper, and beside the others: SRPT, because
it beats LARS on most requests, and the ladder, because it is Headway's default. The paper's gain of multi-prefill
batching (1.6-1.8×) rests on a deadline that it does not define; ours is reported at each rate as it comes out.

What hangs on that deadline (`medha.deadlines`): it is max(floor, k·w), w the prefill alone. Medha's example has 1.6·w
for a document and 2·w for chats (§4.1); ours is max(1 s, 5·w). The gain is the median TTFT of LARS without batching
over that with it, at 0.75 QPS and 5% long, in a window of 900 s, first seed. Under Algorithm 2 as printed (paper mode)
a long request that is late yields nothing: the gain is 1 where deadlines follow the work closely.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ExperimentReport, Mode, RunOptions
from headway_research.medha.setting import LONG_SHARE, POLICY_SETTING, AtRate, MedhaSetting, MedhaStudy, scenario
from headway_research.verdicts import ascending, at_least, at_most, band, judge, only, order

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
        return partial(runs.ratio, AtRate(policy, qps), AtRate("Medha", qps))

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
            partial(runs.ratio, AtRate("EDF", low), AtRate(under, low)),
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
    chats = (runs.ratio(AtRate("ladder", q), AtRate("Medha", q), "default", "short_ttft_s", "p99") for q in runs.qps)
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
            {policy: [(qps, runs.value(AtRate(policy, qps), mode)) for qps in runs.qps] for policy in systems[mode]},
        )
        for mode in MODES
    )
    return ExperimentReport(source=runs.source(), rows=tuple(rows), panels=panels)


def _over_best(runs: MedhaStudy, metric: str) -> float | None:
    """Return the ladder's least ratio over the rates to the best policy; None where no policy has any."""

    def share(policy: str, qps: float) -> float:
        return runs.value(AtRate(policy, qps), "default", metric) or 0.0

    best = {qps: max(share(policy, qps) for policy in POLICIES) for qps in runs.qps}
    return min((share("ladder", qps) / most for qps, most in best.items() if most), default=None)


# -- the deadline ------------------------------------------------------------------------------------------------------

QPS, WINDOW_S = 0.75, 900.0
DEADLINES: dict[str, tuple[float, float]] = {
    "1.6w": (0.0, 1.6),
    "2w": (0.0, 2.0),
    "max(0.1 s, 2w)": (0.1, 2.0),
    "max(0.3 s, 2w)": (0.3, 2.0),
    "max(1 s, 5w)": (1.0, 5.0),
}
"""(floor in seconds, factor k) by the deadline in words."""


def deadline_scenario(system: str, mode: Mode, qps: float, long_share: float, window_s: float) -> dict[str, Any]:
    """Return a point. system: `LARS` or `Medha`, a comma, and one of `DEADLINES`."""
    policy, _, deadline = system.partition(", ")
    base_s, factor = DEADLINES[deadline]
    data = scenario(policy, mode, qps, long_share, window_s)
    medha = data["policy"].get("medha", {}) | {"deadline_base_s": base_s, "deadline_factor": factor}
    return data | {"policy": data["policy"] | {"medha": medha}}


SETTING = MedhaSetting(
    name="deadlines",
    make=deadline_scenario,
    systems={f"{policy}, {deadline}": {} for policy in ("LARS", "Medha") for deadline in DEADLINES},
    shown="Medha, 2w",
    latency=POLICY_SETTING.latency,
    description="as Medha's policy figures, at 0.75 QPS, with the deadline of requests without one varied",
    window_s=WINDOW_S,
)


def deadlines(options: RunOptions) -> ExperimentReport:
    """See the module."""
    runs = MedhaStudy(options, SETTING)
    runs.ensure([(system, mode) for system in SETTING.systems for mode in MODES], [QPS], [LONG_SHARE])

    def gains(mode: Mode) -> dict[str, float]:
        found = {d: runs.ratio(AtRate(f"LARS, {d}", QPS), AtRate(f"Medha, {d}", QPS), mode) for d in DEADLINES}
        return {deadline: gain for deadline, gain in found.items() if gain is not None}

    rows = (
        judge(
            "Gain of multi-prefill batching by the deadline that the paper leaves open, 0.75 QPS",
            "1.6-1.8× (§6.4)",
            order(
                "1.6 to 1.8 lie within what deadlines span", lambda f: min(f.values()) < 1.6 and max(f.values()) > 1.8
            ),
            gains,
            "The gain is a free function of the deadline: in default mode 1.6 to 1.8 lie at a floor of about 0.1 s.",
        ),
        judge(
            "Gain of multi-prefill batching rises with the deadline, 0.75 QPS",
            None,
            ascending("rises"),
            only("default", gains("default")),
        ),
    )
    lines = {f"{mode} mode": [(DEADLINES[d][0], gain) for d, gain in gains(mode).items()] for mode in MODES}
    panel = ReportChart(title="Gain of multi-prefill batching", x="floor of the deadline, s", y="times", lines=lines)
    return ExperimentReport(source=runs.source(), rows=rows, panels=(panel,))
