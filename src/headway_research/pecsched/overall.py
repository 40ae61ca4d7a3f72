"""PecSched §6.3 and §6.4: queueing, throughput and JCT against its peers (Fig. 9 to 11) and without each of its parts
(Fig. 12 to 14, Table 6); its headlines. Each claim is judged under each regime of `setting`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean
from typing import Any

from headway.sim.report.page import ReportChart
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions
from headway_research.pecsched.setting import ABLATIONS, CUTS, PEERS, REGIMES, SERVED, PecSchedStudy, Regime
from headway_research.verdicts import VerdictRule, at_least, at_most, both, every, judge, only, order

SUSPENSIONS = {"PecSched": "94,057 to 170,914", "/Dis": "1.15–1.19×", "/CoL": "1.39–1.53×", "/FSP": "1.77–2.22×"}


def prepared(options: RunOptions, systems: tuple[str, ...]) -> PecSchedStudy:
    """Return the study with its simulations run: ablations in default mode only, other systems in both."""
    runs = PecSchedStudy(options)
    modes: dict[str, tuple[Mode, ...]] = dict.fromkeys(ABLATIONS, ("default",))
    points = [(system, mode) for system in systems for mode in modes.get(system, MODES)]
    runs.ensure(points, REGIMES if set(systems).isdisjoint(ABLATIONS) else SERVED)
    return runs


def _rows(
    claim: str,
    paper: Any,
    check: VerdictRule,
    find: Callable[[Regime], Mapping[Mode, Any]],
    note: str = "",
    regimes: tuple[Regime, ...] = REGIMES,
) -> list[ClaimRow]:
    """Return the row of a claim under each regime."""
    return [judge(f"{regime}: {claim}", paper, check, find(regime), note) for regime in regimes]


def _over(runs: PecSchedStudy, peer: str, metric: str, regime: Regime) -> dict[Mode, Any]:
    return both(lambda mode: runs.ratios("PecSched", peer, mode, regime, metric))


def fig9(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 9: queueing of short requests."""
    runs = prepared(options, (*PEERS, "PecSched"))
    rows = []
    for peer, paper in (("FIFO", "0.42 to 0.13 (−58% to −87%)"), ("Reservation", "0.39 to 0.08 (−61% to −92%)")):
        claim = f"P99 queueing of short requests, PecSched over {peer}"
        rows += _rows(claim, paper, every(at_most(0.5)), partial(_over, runs, peer, "delay_s"))
    rows += _rows(
        "P99 queueing of short requests under PecSched, seconds",
        "as under Priority: prefills of short requests do not wait",
        every(at_most(1.0)),
        lambda regime: both(lambda mode: runs.values("PecSched", mode, regime, "delay_s")),
    )
    return ExperimentReport(source=runs.source(REGIMES), rows=tuple(rows), panels=_panels(runs, (*PEERS, "PecSched")))


def fig10(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 10: throughput of short requests."""
    runs = prepared(options, (*PEERS, "PecSched"))
    note = "Short requests that all are served cannot be served faster: their throughput is what was offered."
    rows = []
    for peer, paper in (("FIFO", "1.42 to 4.18"), ("Reservation", "2.93 to 6.95")):
        claim = f"throughput of short requests, PecSched over {peer}"
        rows += _rows(claim, paper, every(at_least(1.2)), partial(_over, runs, peer, "short_rps"), note)
    return ExperimentReport(source=runs.source(REGIMES), rows=tuple(rows))


def fig11(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 11: JCT of long requests."""
    runs = prepared(options, (*PEERS, "PecSched"))
    rows = []
    for peer, paper in (("FIFO", "1.04 to 1.07"), ("Reservation", "1.06 to 1.13")):
        claim = f"mean JCT of long requests, PecSched over {peer}"
        rows += _rows(claim, paper, every(at_most(1.15)), partial(_over, runs, peer, "long_jct_s"), "", SERVED)
    return ExperimentReport(source=runs.source(SERVED), rows=tuple(rows))


def _without(runs: PecSchedStudy, metric: str, regime: Regime) -> dict[Mode, Any]:
    """Return a metric without each part over PecSched's, averaged over models."""
    found = {part: runs.ratios(part, "PecSched", "default", regime, metric) for part in ABLATIONS}
    return only("default", {part: fmean(ratios.values()) for part, ratios in found.items() if ratios})


def _part(runs: PecSchedStudy, part: str, metric: str, regime: Regime) -> dict[Mode, Any]:
    return only("default", runs.ratios(part, "PecSched", "default", regime, metric))


def fig12(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 12: queueing of short requests without each part."""
    runs = prepared(options, ("PecSched", *ABLATIONS))
    rows = _rows(
        "P99 queueing of short requests without a part over PecSched, mean of models",
        {"/PE": "1.75 to 4.76", "others": "about 1"},
        order("/PE at least 1.75, and the largest", _pe_largest),
        partial(_without, runs, "delay_s"),
        "Without a model under which nothing queues.",
        SERVED,
    )
    panels = _panels(runs, ("PecSched", *ABLATIONS))
    return ExperimentReport(source=runs.source(SERVED), rows=tuple(rows), panels=panels)


def fig13(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 13: throughput of short requests without each part."""
    runs = prepared(options, ("PecSched", *ABLATIONS))
    rows = _rows(
        "throughput of short requests without a part over PecSched, mean of models",
        {"/PE": "0.79 to 0.52", "others": "about 1"},
        order("/PE below 0.8", lambda found: found.get("/PE", 1.0) < 0.8),
        partial(_without, runs, "short_rps"),
        "",
        SERVED,
    )
    return ExperimentReport(source=runs.source(SERVED), rows=tuple(rows))


def _pe_largest(found: Mapping[str, float]) -> bool:
    return bool(found) and found.get("/PE", 0.0) >= 1.75 and found["/PE"] == max(found.values())


def fig14(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 14: JCT of long requests without each part."""
    runs = prepared(options, ("PecSched", *ABLATIONS))
    paper = {"/PE": "0.86 to 0.82", "/Dis": "1.21 to 1.29", "/CoL": "1.23 to 1.26", "/FSP": "1.39 to 1.55"}
    rows = _rows(
        "mean JCT of long requests, order of /FSP, PecSched and /PE, mean of models",
        {part: paper[part] for part in ("/FSP", "/PE")},
        order("/FSP above PecSched above /PE", lambda f: f.get("/FSP", 0.0) > 1.0 > f.get("/PE", 1.0)),
        partial(_without, runs, "long_jct_s"),
        "",
        SERVED,
    )
    for part in ("/Dis", "/CoL", "/FSP"):
        claim = f"mean JCT of long requests, {part} over PecSched"
        rows += _rows(claim, paper[part], every(at_least(1.0)), partial(_part, runs, part, "long_jct_s"), "", SERVED)
    return ExperimentReport(source=runs.source(SERVED), rows=tuple(rows))


def table6(options: RunOptions) -> ExperimentReport:
    """Reproduce Table 6: suspensions of long requests."""
    runs = prepared(options, ("PecSched", *ABLATIONS))
    rows = _rows(
        "suspensions of a long request under PecSched",
        f"{SUSPENSIONS['PecSched']} in all, of requests whose number is not stated",
        every(at_least(1.0)),
        lambda regime: both(lambda mode: runs.quotients("PecSched", mode, regime, "pauses", "longs")),
        "The trace of 2023 has some 1,400 requests above its 95th percentile: 67 to 122 suspensions each.",
        SERVED,
    )
    for part in ("/Dis", "/CoL", "/FSP"):
        claim = f"suspensions, {part} over PecSched"
        rows += _rows(claim, SUSPENSIONS[part], every(at_least(1.0)), partial(_part, runs, part, "pauses"), "", SERVED)
    return ExperimentReport(source=runs.source(SERVED), rows=tuple(rows))


def headlines(options: RunOptions) -> ExperimentReport:
    """Reproduce the abstract: P99 queueing −92%, throughput +595%, long requests' JCT +4% to +13%."""
    runs = prepared(options, ("FIFO", "Reservation", "PecSched"))

    def best(metric: str, mode: Mode, lowest: bool) -> dict[str, float]:
        """Return the ratio that is best for PecSched, over models and both peers, by regime."""
        found: dict[str, float] = {}
        for regime in REGIMES:
            ratios = [
                ratio
                for peer in ("FIFO", "Reservation")
                for ratio in runs.ratios("PecSched", peer, mode, regime, metric).values()
            ]
            found[regime] = min(ratios) if lowest else max(ratios)
        return found

    def worst_jct(mode: Mode) -> dict[str, float]:
        ratios: dict[str, dict[str, float]] = {
            regime: runs.ratios("PecSched", "FIFO", mode, regime, "long_jct_s") for regime in SERVED
        }
        return {regime: max(found.values()) for regime, found in ratios.items() if found}

    rows = (
        judge(
            "P99 queueing of short requests falls by up to (best model and peer, by regime)",
            "up to 92% (§1)",
            every(at_least(0.92), "regime"),
            both(lambda mode: {regime: 1 - ratio for regime, ratio in best("delay_s", mode, True).items()}),
        ),
        judge(
            "throughput of short requests rises by up to 595% at one of the loads",
            "up to 595% (§1)",
            order("within the range of the regimes", lambda f: min(f.values()) <= 5.95 <= max(f.values())),
            both(lambda mode: {regime: ratio - 1 for regime, ratio in best("short_rps", mode, False).items()}),
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
            title=f"P99 queueing of short requests, {regime}",
            x="model (7B, 14B, 34B, 70B)",
            y="seconds",
            log_y=True,
            lines={
                system: [
                    (at, max(1e-3, value))
                    for at, value in enumerate(runs.values(system, "default", regime, "delay_s").values())
                ]
                for system in ("FIFO", "Reservation", "PecSched")
            },
        )
        for regime in REGIMES[:3]
    )
    return ExperimentReport(source=runs.source(REGIMES), rows=rows, panels=panels)


def _panels(runs: PecSchedStudy, systems: tuple[str, ...]) -> tuple[ReportChart, ...]:
    return tuple(
        ReportChart(
            title=f"Queueing of short requests, {name}, {regime}",
            x="percentile",
            y="seconds",
            log_y=True,
            lines={system: [(cut, _delay_s(runs, name, system, regime, cut)) for cut in CUTS] for system in systems},
        )
        for name in runs.names
        for regime in ("0.8", "2023")
    )


def _delay_s(runs: PecSchedStudy, name: str, system: str, regime: Regime, cut: int) -> float:
    """Return a value of at least 0.1 ms, for a logarithmic axis."""
    return max(1e-4, runs.value(name, system, "default", regime, "delay_s", f"p{cut}") or 0.0)
