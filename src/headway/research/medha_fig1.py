"""Medha Fig. 1 and §6.4's sensitivity: TTFT at 0.75 QPS as the share of long requests grows from 0 to 5%.

LoongServe runs with the first seed and at three shares only, because its small decode batches are slow to simulate.
`non-preemptive` (whole prompts in order of arrival on two instances of TP8) stands beside it over all shares and seeds.
The paper's abstract says P99 where its text and Fig. 1a say P90 for 174×; P90 is used.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from headway.research.base import MODES, ExperimentReport, Mode, PlotPanel, RunOptions
from headway.research.medha_setting import LONG_SHARE, MedhaStudy
from headway.research.verdicts import ascending, at_least, at_most

QPS = 0.75
LOONG_SHARES = (0.0, 0.01, LONG_SHARE)
LOONG_NOTE = "First seed only."
SHARES = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""
    runs = MedhaStudy(options)
    shares = (0.0, 0.01, 0.05) if options.quick else SHARES
    runs.need([("Medha", mode) for mode in MODES] + [("non-preemptive", "default")], [QPS], shares)
    first = MedhaStudy(replace(options, seeds=runs.seeds[:1]))
    first.need([(system, mode) for system in ("LoongServe", "Medha") for mode in MODES], [QPS], LOONG_SHARES)

    def cut(system: str, name: str, share: float, mode: Mode) -> float:
        return runs.value(system, mode, QPS, "ttft_s", name, share) or 0.0

    def grown(name: str, share: float, mode: Mode) -> float | None:
        if mode == "paper":  # whole prompts ask nothing that the modes differ in
            return None
        return cut("non-preemptive", name, share, mode) / max(cut("non-preemptive", name, 0.0, mode), 1e-9)

    def over_medha(name: str, mode: Mode) -> float:
        return cut("non-preemptive", name, LONG_SHARE, "default") / max(cut("Medha", name, LONG_SHARE, mode), 1e-9)

    def medha(mode: Mode) -> dict[str, float]:
        return {f"{share:.0%}": cut("Medha", "p90", share, mode) for share in shares}

    def loong(name: str, share: float, mode: Mode) -> float:
        return first.value("LoongServe", mode, QPS, "ttft_s", name, share) or 0.0

    def loong_grown(name: str, share: float, mode: Mode) -> float:
        return loong(name, share, mode) / max(loong(name, 0.0, mode), 1e-9)

    def loong_over_medha(name: str, mode: Mode) -> float:
        medha_s = first.value("Medha", mode, QPS, "ttft_s", name, LONG_SHARE) or 0.0
        return loong(name, LONG_SHARE, mode) / max(medha_s, 1e-9)

    rows = [
        runs.judge(
            "Medha's P90 TTFT at 5% long stays under 10 s",
            "< 10 s",
            at_most(10.0),
            partial(cut, "Medha", "p90", LONG_SHARE),
            "Longs are themselves 5% of the requests, so that P90 lies among chats.",
        ),
        runs.judge("Medha's P90 TTFT by share of longs, seconds", "grows gracefully", ascending("rises"), medha),
        *(
            first.judge(
                f"LoongServe: {of} TTFT at {share:.0%} over that at 0%",
                paper,
                at_least(low),
                partial(loong_grown, name, share),
                LOONG_NOTE,
            )
            for of, name, share, paper, low in (
                ("median", "p50", LONG_SHARE, "30×", 30.0),
                ("P90", "p90", LONG_SHARE, "174×", 174.0),
                ("P90", "p90", 0.01, "8× (which percentile is not said)", 8.0),
            )
        ),
        *(
            first.judge(
                f"LoongServe over Medha, {of} TTFT at 5% long",
                paper,
                at_least(low),
                partial(loong_over_medha, name),
                LOONG_NOTE,
            )
            for of, name, paper, low in (("median", "p50", "30×", 30.0), ("P90", "p90", "174×", 174.0))
        ),
        runs.judge(
            "Non-preemptive: median TTFT at 5% over that at 0%",
            "30×",
            at_least(30.0),
            partial(grown, "p50", LONG_SHARE),
            "One-sided: the paper's TTFT of chats holds a front end that ours lacks.",
            approximate=True,
        ),
        runs.judge(
            "Non-preemptive: P90 TTFT at 5% over that at 0%",
            "174×",
            at_least(174.0),
            partial(grown, "p90", LONG_SHARE),
            approximate=True,
        ),
        runs.judge(
            "Non-preemptive: P90 TTFT at 1% over that at 0%",
            "8× (which percentile is not said)",
            at_least(8.0),
            partial(grown, "p90", 0.01),
            approximate=True,
        ),
        runs.judge(
            "Non-preemptive over Medha, median TTFT at 5% long",
            "30×",
            at_least(30.0),
            partial(over_medha, "p50"),
            approximate=True,
        ),
        runs.judge(
            "Non-preemptive over Medha, P90 TTFT at 5% long",
            "174×",
            at_least(174.0),
            partial(over_medha, "p90"),
            approximate=True,
        ),
    ]
    panels = tuple(
        PlotPanel(
            title=f"TTFT {name} at {QPS:g} QPS",
            x="share of long requests",
            y="seconds",
            log_y=True,
            lines={
                system: [(share, cut(system, name, share, "default")) for share in shares]
                for system in ("Medha", "non-preemptive")
            }
            | {"LoongServe": [(share, loong(name, share, "default")) for share in LOONG_SHARES]},
        )
        for name in ("p50", "p90")
    )
    return ExperimentReport(source=runs.source(), rows=tuple(rows), panels=panels)
