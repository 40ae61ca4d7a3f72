"""PecSched's simulated figures, each claim under each regime of `setting`.

§3: lengths (Fig. 1), FIFO with and without long requests (Fig. 2), reservation (Fig. 3, Table 1), priority (Table 2),
preemptions without fast SP (Table 3). §6.3 and §6.4: queueing, throughput and JCT against its peers (Fig. 9 to 11) and
without each of its parts (Fig. 12 to 14, Table 6); its headlines. §3 knows no modes of PecSched: default mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import numpy as np

from headway.sim.report.page import ReportChart
from headway.sim.workload.generate import ConstantArrivals, preset
from headway_research.base import MODES, ExperimentReport, Mode, RunOptions, source
from headway_research.pecsched.setting import ABLATIONS, CUTS, MODELS, PEERS, REGIMES, SERVED, PecSchedStudy, Regime
from headway_research.verdicts import (
    VerdictRule,
    ascending,
    at_least,
    at_most,
    band,
    both,
    every,
    judge,
    judge_same,
    order,
)

LONGEST = {"2023": 14_050, "2024": 8_000}
PARTS = ("PecSched", *ABLATIONS)
DEFAULT: tuple[Mode, ...] = ("default",)
SUSPENSIONS = {"PecSched": "94,057 to 170,914", "/Dis": "1.15–1.19×", "/CoL": "1.39–1.53×", "/FSP": "1.77–2.22×"}
JCT = {"/PE": "0.86 to 0.82", "/Dis": "1.21 to 1.29", "/CoL": "1.23 to 1.26", "/FSP": "1.39 to 1.55"}


def _by_model(*values: float) -> dict[str, float]:
    """Return a paper's values by model, in its order."""
    return dict(zip(MODELS, values, strict=True))


class FindByModel(Protocol):
    """What a claim is about: a value by model."""

    def __call__(self, runs: PecSchedStudy, mode: Mode, regime: Regime) -> Mapping[str, float]: ...


class RegimeClaim(NamedTuple):
    """A claim that is judged under each regime."""

    claim: str
    paper: Any
    check: VerdictRule
    find: FindByModel
    note: str = ""
    modes: tuple[Mode, ...] = MODES


def ratio(system: str, peer: str, metric: str) -> FindByModel:
    """Return a metric of a system over its peer's, by model."""
    return lambda runs, mode, regime: runs.ratios(system, peer, mode, regime, metric)


def value(system: str, metric: str, per: str | None = None) -> FindByModel:
    """Return a metric of a system, by model. per: over another metric."""
    if per is None:
        return lambda runs, mode, regime: runs.values(system, mode, regime, metric)
    return lambda runs, mode, regime: runs.quotients(system, mode, regime, metric, per)


def without(metric: str) -> FindByModel:
    """Return a metric without each part over PecSched's, averaged over models."""

    def find(runs: PecSchedStudy, mode: Mode, regime: Regime) -> Mapping[str, float]:
        found = {part: runs.ratios(part, "PecSched", mode, regime, metric) for part in ABLATIONS}
        return {part: fmean(ratios.values()) for part, ratios in found.items() if ratios}

    return find


def prepared(options: RunOptions, systems: Sequence[str], regimes: Sequence[Regime]) -> PecSchedStudy:
    """Return the study with its simulations run: ablations in default mode only, other systems in both."""
    runs = PecSchedStudy(options)
    modes: dict[str, tuple[Mode, ...]] = dict.fromkeys(ABLATIONS, DEFAULT)
    runs.ensure([(system, mode) for system in systems for mode in modes.get(system, MODES)], regimes)
    return runs


def _figure(
    options: RunOptions,
    systems: Sequence[str],
    claims: Sequence[RegimeClaim],
    regimes: Sequence[Regime] = REGIMES,
    drawn: bool = False,
) -> ExperimentReport:
    """Return the rows of claims under each regime. drawn: with the systems' queueing delays."""
    runs = prepared(options, systems, regimes)
    rows = tuple(
        judge(
            f"{regime}: {each.claim}",
            each.paper,
            each.check,
            {mode: each.find(runs, mode, regime) if mode in each.modes else None for mode in MODES},
            each.note,
        )
        for each in claims
        for regime in regimes
    )
    panels = [
        ReportChart(
            title=f"Queueing of short requests, {name}, {regime}",
            x="percentile",
            y="seconds",
            log_y=True,
            lines={system: [(cut, _delay_s(runs, name, system, regime, cut)) for cut in CUTS] for system in systems},
        )
        for name in runs.names
        for regime in ("0.8", "2023")
        if drawn
    ]
    return ExperimentReport(source=runs.source(regimes), rows=rows, panels=tuple(panels))


def _delay_s(runs: PecSchedStudy, name: str, system: str, regime: Regime, cut: int) -> float:
    """Return a value of at least 0.1 ms, for a logarithmic axis."""
    return max(1e-4, runs.value(name, system, "default", regime, "delay_s", f"p{cut}") or 0.0)


# -- §3 ----------------------------------------------------------------------------------------------------------------


def fig1(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 1 on the lengths of both traces: the paper cites that of 2024 and describes that of 2023.

    2023: Azure's conversations, to which the presets were fitted. 2024: coding and conversations, as published."""
    count = 2000 if options.quick else 50_000
    rng = np.random.default_rng(0)
    drawn = {
        year: preset(name).draw(rng, ConstantArrivals(1.0), count)
        for year, name in (("2023", "azure-conv-like"), ("2024", "pecsched-short-2024"))
    }
    below = {year: float(np.mean([r.prompt_tokens < 2048 for r in requests])) for year, requests in drawn.items()}
    # the 2024 preset ends at the 95th percentile, so its share of short prompts is of 95%
    below["2024"] *= 0.95
    outputs = {year: float(np.mean([r.output_tokens < 800 for r in requests])) for year, requests in drawn.items()}
    rows = (
        judge_same("2023: share of prompts below 2,048 tokens", "about 80%", band(0.75, 0.85), below["2023"]),
        judge_same("2024: share of prompts below 2,048 tokens", "about 80%", band(0.75, 0.85), below["2024"]),
        judge_same("Share of outputs below 800 tokens", "all", every(at_least(0.985), "year"), outputs),
        judge_same(
            "The longest prompt of the trace, tokens",
            "around 9K (§6.2)",
            every(band(8_500, 9_500), "year"),
            LONGEST,
            "The figures of 2024 end at 7,690 (coding) and 8,000 (conversations).",
        ),
    )
    return ExperimentReport(source=source("none", "presets azure-conv-like, pecsched-short-2024", [0], 0.0), rows=rows)


def _beside(
    options: RunOptions, system: str, peer: str, words: str, paper: tuple[dict[str, float], dict[str, float]], why: str
) -> ExperimentReport:
    """Return rows of queueing and throughput of short requests under a system, over those under its peer."""
    claims = [
        RegimeClaim(f"P99 queueing of short requests {words}", paper[0], every(at_least(1.0)),
                    ratio(system, peer, "delay_s"), why, DEFAULT),
        RegimeClaim(f"throughput of short requests {words}", paper[1], every(at_most(0.95)),
                    ratio(system, peer, "short_rps"), "", DEFAULT),
    ]  # fmt: skip
    return _figure(options, (system, peer), claims)


def fig2(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 2: short requests under FIFO, with long requests and without."""
    paper = _by_model(2.5, 2.78, 3.84, 10.2), _by_model(0.64, 0.56, 0.39, 0.19)
    why = "Where nothing queues without long requests the ratio has no meaningful size."
    return _beside(options, "FIFO", "FIFO, no longs", "with long ones over without", paper, why)


def fig3(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 3: short requests under reservation and under FIFO."""
    paper = _by_model(1.2, 1.35, 1.8, 1.94), _by_model(0.49, 0.47, 0.46, 0.44)
    why = "Worse than FIFO only where short requests saturate their part of the cluster."
    return _beside(options, "Reservation", "FIFO", "under reservation over FIFO", paper, why)


def table1(options: RunOptions) -> ExperimentReport:
    """Reproduce Table 1: idle share of the cluster under FIFO and under reservation."""
    claims = [
        RegimeClaim("idle share under reservation", _by_model(0.16, 0.22, 0.25, 0.41), every(at_least(0.1)),
                    value("Reservation", "idle"), "", DEFAULT),
        RegimeClaim("idle share under FIFO", _by_model(0.0004, 0.00009, 0.0005, 0.00008), every(at_most(0.001)),
                    value("FIFO", "idle"), "Replicas that wait for the others of a ring count as idle here.", DEFAULT),
    ]  # fmt: skip
    return _figure(options, ("FIFO", "Reservation"), claims)


def table2(options: RunOptions) -> ExperimentReport:
    """Reproduce Table 2: long requests that never run under priority."""
    claims = [
        RegimeClaim("share of long requests that starve under priority", _by_model(0.92, 0.97, 1.0, 1.0),
                    every(at_least(0.9)), value("Priority", "starved"), "", DEFAULT),
        RegimeClaim("share of long requests that starve under PecSched", None, every(at_most(0.0)),
                    value("PecSched", "starved"), "paper mode has no ageing."),
    ]  # fmt: skip
    return _figure(options, ("Priority", "PecSched"), claims)


def table3(options: RunOptions) -> ExperimentReport:
    """Reproduce Table 3: preemptions of long prefills where sequence parallelism is plain ring attention (/FSP)."""
    claim = RegimeClaim(
        "preemptions of all long requests, for a long request",
        "rising with the model: 167,394, 205,947, 278,504, 379,305 in all",
        ascending("rising with the model"),
        value("/FSP", "pauses", "longs"),
        "The paper's number of requests is not stated, and our models run for different times.",
        DEFAULT,
    )
    return _figure(options, ("/FSP",), [claim], SERVED)


# -- §6 ----------------------------------------------------------------------------------------------------------------


def _over_peers(
    words: str, metric: str, check: VerdictRule, note: str, fifo: str, reservation: str
) -> list[RegimeClaim]:
    """Return the claims on PecSched over both peers. fifo, reservation: the paper's values."""
    return [
        RegimeClaim(f"{words}, PecSched over {peer}", paper, every(check), ratio("PecSched", peer, metric), note)
        for peer, paper in (("FIFO", fifo), ("Reservation", reservation))
    ]


def _of_parts(words: str, metric: str, check: VerdictRule, paper: Mapping[str, Any]) -> list[RegimeClaim]:
    """Return the claims on what the lack of a part does to a metric."""
    return [
        RegimeClaim(f"{words}, {part} over PecSched", paper[part], every(check), ratio(part, "PecSched", metric), "",
                    DEFAULT)
        for part in ("/Dis", "/CoL", "/FSP")
    ]  # fmt: skip


def fig9(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 9: queueing of short requests."""
    words, paper = "P99 queueing of short requests", ("0.42 to 0.13 (−58% to −87%)", "0.39 to 0.08 (−61% to −92%)")
    claims = _over_peers(words, "delay_s", at_most(0.5), "", *paper)
    as_priority = "as under Priority: prefills of short requests do not wait"
    claims.append(
        RegimeClaim(f"{words} under PecSched, seconds", as_priority, every(at_most(1.0)), value("PecSched", "delay_s"))
    )
    return _figure(options, (*PEERS, "PecSched"), claims, drawn=True)


def fig10(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 10: throughput of short requests."""
    note = "Short requests that all are served cannot be served faster: their throughput is what was offered."
    words, paper = "throughput of short requests", ("1.42 to 4.18", "2.93 to 6.95")
    return _figure(options, (*PEERS, "PecSched"), _over_peers(words, "short_rps", at_least(1.2), note, *paper))


def fig11(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 11: JCT of long requests."""
    claims = _over_peers("mean JCT of long requests", "long_jct_s", at_most(1.15), "", "1.04 to 1.07", "1.06 to 1.13")
    return _figure(options, (*PEERS, "PecSched"), claims, SERVED)


def fig12(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 12: queueing of short requests without each part."""

    def pe_largest(found: Mapping[str, float]) -> bool:
        return bool(found) and found.get("/PE", 0.0) >= 1.75 and found["/PE"] == max(found.values())

    claim = RegimeClaim(
        "P99 queueing of short requests without a part over PecSched, mean of models",
        {"/PE": "1.75 to 4.76", "others": "about 1"},
        order("/PE at least 1.75, and the largest", pe_largest),
        without("delay_s"),
        "Without a model under which nothing queues.",
        DEFAULT,
    )
    return _figure(options, PARTS, [claim], SERVED, drawn=True)


def fig13(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 13: throughput of short requests without each part."""
    claim = RegimeClaim(
        "throughput of short requests without a part over PecSched, mean of models",
        {"/PE": "0.79 to 0.52", "others": "about 1"},
        order("/PE below 0.8", lambda found: found.get("/PE", 1.0) < 0.8),
        without("short_rps"),
        "",
        DEFAULT,
    )
    return _figure(options, PARTS, [claim], SERVED)


def fig14(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 14: JCT of long requests without each part."""
    words = "mean JCT of long requests"
    claim = RegimeClaim(
        f"{words}, order of /FSP, PecSched and /PE, mean of models",
        {part: JCT[part] for part in ("/FSP", "/PE")},
        order("/FSP above PecSched above /PE", lambda f: f.get("/FSP", 0.0) > 1.0 > f.get("/PE", 1.0)),
        without("long_jct_s"),
        "",
        DEFAULT,
    )
    return _figure(options, PARTS, [claim, *_of_parts(words, "long_jct_s", at_least(1.0), JCT)], SERVED)


def table6(options: RunOptions) -> ExperimentReport:
    """Reproduce Table 6: suspensions of long requests."""
    claim = RegimeClaim(
        "suspensions of a long request under PecSched",
        f"{SUSPENSIONS['PecSched']} in all, of requests whose number is not stated",
        every(at_least(1.0)),
        value("PecSched", "pauses", "longs"),
        "The trace of 2023 has some 1,400 requests above its 95th percentile: 67 to 122 suspensions each.",
    )
    return _figure(options, PARTS, [claim, *_of_parts("suspensions", "pauses", at_least(1.0), SUSPENSIONS)], SERVED)


def headlines(options: RunOptions) -> ExperimentReport:
    """Reproduce the abstract: P99 queueing −92%, throughput +595%, long requests' JCT +4% to +13%."""
    systems = ("FIFO", "Reservation", "PecSched")
    runs = prepared(options, systems, REGIMES)

    def over_peers(metric: str, mode: Mode, regime: Regime) -> list[float]:
        """Return the ratios of PecSched to both peers, over models."""
        return [found for peer in systems[:2] for found in runs.ratios("PecSched", peer, mode, regime, metric).values()]

    def saved(mode: Mode) -> dict[str, float]:
        return {regime: 1 - min(over_peers("delay_s", mode, regime)) for regime in REGIMES}

    def gained(mode: Mode) -> dict[str, float]:
        return {regime: max(over_peers("short_rps", mode, regime)) - 1 for regime in REGIMES}

    def worst_jct(mode: Mode) -> dict[str, float]:
        found = {regime: runs.ratios("PecSched", "FIFO", mode, regime, "long_jct_s") for regime in SERVED}
        return {regime: max(ratios.values()) for regime, ratios in found.items() if ratios}

    rows = (
        judge(
            "P99 queueing of short requests falls by up to (best model and peer, by regime)",
            "up to 92% (§1)",
            every(at_least(0.92), "regime"),
            both(saved),
        ),
        judge(
            "throughput of short requests rises by up to 595% at one of the loads",
            "up to 595% (§1)",
            order("within the range of the regimes", lambda f: min(f.values()) <= 5.95 <= max(f.values())),
            both(gained),
        ),
        judge(
            "mean JCT of long requests over FIFO's (worst model, by regime)",
            "1.04 to 1.07: without significantly affecting the JCT (§1, §6.3)",
            every(at_most(1.15), "regime"),
            both(worst_jct),
        ),
    )
    panels = tuple(
        ReportChart(
            title=f"P99 queueing of short requests, load {regime}",
            x="model",
            unit="seconds",
            log_y=True,
            lines={
                system: [
                    (model, max(1e-3, found))
                    for model, found in runs.values(system, "default", regime, "delay_s").items()
                ]
                for system in systems
            },
        )
        for regime in REGIMES[:3]
    )
    return ExperimentReport(source=runs.source(REGIMES), rows=rows, panels=panels)
