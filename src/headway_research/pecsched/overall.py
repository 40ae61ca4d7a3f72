"""PecSched §6.3 and §6.4: queueing, throughput and JCT against its peers (Fig. 9–11) and without each of its parts
(Fig. 12–14, Table 6). The setting and its regimes: `setting`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from headway_research.base import MODES, ExperimentReport, Mode, PlotPanel, RunOptions
from headway_research.pecsched.setting import ABLATIONS, CUTS, PEERS, PecSchedStudy, Regime
from headway_research.verdicts import VerdictRule, both, judge, order

REGIMES: tuple[Regime, ...] = ("unsaturated", "busy", "trace")
SUSPENSIONS = {"PecSched": "94,057 to 170,914", "/Dis": "1.15–1.19×", "/CoL": "1.39–1.53×", "/FSP": "1.77–2.22×"}

DECODERS = (
    "The 4, 4, 1 and 1 replicas that decode short requests bound PecSched's throughput where short requests are many: "
    "they can decode 59% to 92% of what arrives in `unsaturated`, 33% to 51% in `busy`."
)


def _all(words: str, low: float = 0.0, high: float = float("inf")) -> VerdictRule:
    return order(words, lambda found: bool(found) and low <= min(found.values()) and max(found.values()) <= high)


def _against(runs: PecSchedStudy, peer: str, regime: Regime, metric: str, mode: Mode) -> dict[str, float]:
    return runs.ratios("PecSched", peer, mode, regime, metric)


def _default(found: dict[str, float]) -> dict[Mode, dict[str, float] | None]:
    return {"paper": None, "default": found}


def _prepared(options: RunOptions, systems: tuple[str, ...]) -> PecSchedStudy:
    """Return the study with its simulations run: ablations in default mode only, other systems in both."""
    runs = PecSchedStudy(options)
    modes: dict[str, tuple[Mode, ...]] = dict.fromkeys(ABLATIONS, ("default",))
    runs.ensure([(system, mode) for system in systems for mode in modes.get(system, MODES)], REGIMES)
    return runs


def fig9(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 9: queueing of short requests."""
    runs = _prepared(options, (*PEERS, "PecSched"))
    paper = {"FIFO": "0.42 to 0.13", "Reservation": "0.39 to 0.08", "Priority": "about 1"}
    rows = [
        judge(
            f"{regime}: P99 queueing of short requests, PecSched over {peer}",
            paper[peer],
            _all("at most 0.5 for every model", high=0.5),
            both(partial(_against, runs, peer, regime, "delay_s")),
        )
        for regime in REGIMES
        for peer in ("FIFO", "Reservation")
    ]
    rows += [
        judge(
            f"{regime}: P99 queueing of short requests under PecSched, seconds",
            "as under priority",
            _all("at most a second for every model", high=1.0),
            {mode: runs.values("PecSched", mode, regime, "delay_s") for mode in MODES},
        )
        for regime in REGIMES
    ]
    return ExperimentReport(source=runs.source(REGIMES), rows=tuple(rows), panels=_panels(runs, (*PEERS, "PecSched")))


def fig10(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 10: throughput of short requests."""
    runs = _prepared(options, (*PEERS, "PecSched"))
    paper = {"FIFO": "1.42 to 4.18", "Reservation": "2.93 to 6.95", "Priority": "about 1"}
    rows = [
        judge(
            f"{regime}: throughput of short requests, PecSched over {peer}",
            paper[peer],
            _all("at least 1.2 for every model", low=1.2),
            both(partial(_against, runs, peer, regime, "short_rps")),
            DECODERS,
        )
        for regime in REGIMES
        for peer in ("FIFO", "Reservation")
    ]
    return ExperimentReport(source=runs.source(REGIMES), rows=tuple(rows))


def fig11(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 11: JCT of long requests."""
    runs = _prepared(options, (*PEERS, "PecSched"))
    paper = {"FIFO": "1.04 to 1.07", "Reservation": "1.06 to 1.13"}
    rows = [
        judge(
            f"{regime}: mean JCT of long requests, PecSched over {peer}",
            paper[peer],
            _all("at most 1.15 for every model", high=1.15),
            both(partial(_against, runs, peer, regime, "long_jct_s")),
            _left_out(runs.names, _against(runs, peer, regime, "long_jct_s", "default")),
        )
        for regime in REGIMES
        for peer in paper
    ]
    return ExperimentReport(source=runs.source(REGIMES), rows=tuple(rows))


def _left_out(names: Sequence[str], found: Mapping[str, float]) -> str:
    """Return a sentence that names the models without a value in a row; empty when there is none."""
    missing = ", ".join(name for name in names if name not in found)
    return f"Nothing about {missing}: no long request came in the first half of the window." if missing else ""


def _without(runs: PecSchedStudy, regime: Regime, metric: str, mode: Mode) -> dict[str, float]:
    """Return a metric without each part over PecSched's, averaged over models."""
    found = {}
    for part in ABLATIONS:
        ratios = runs.ratios(part, "PecSched", mode, regime, metric)
        if ratios:
            found[part] = sum(ratios.values()) / len(ratios)
    return found


def fig12(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 12: queueing of short requests without each part."""
    runs = _prepared(options, ("PecSched", *ABLATIONS))
    rows = [
        judge(
            f"{regime}: P99 queueing of short requests without a part over PecSched, mean of models",
            {"/PE": "1.75 to 4.76", "others": "about 1"},
            order("/PE at least 1.75, and the largest", _pe_largest),
            _default(_without(runs, regime, "delay_s", "default")),
        )
        for regime in REGIMES
    ]
    return ExperimentReport(
        source=runs.source(REGIMES), rows=tuple(rows), panels=_panels(runs, ("PecSched", *ABLATIONS))
    )


def fig13(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 13: throughput of short requests without each part."""
    runs = _prepared(options, ("PecSched", *ABLATIONS))
    rows = [
        judge(
            f"{regime}: throughput of short requests without a part over PecSched, mean of models",
            {"/PE": "0.79 to 0.52", "others": "about 1"},
            order("/PE below 0.8", lambda found: found.get("/PE", 1.0) < 0.8),
            _default(_without(runs, regime, "short_rps", "default")),
            DECODERS,
        )
        for regime in REGIMES
    ]
    return ExperimentReport(source=runs.source(REGIMES), rows=tuple(rows))


def _pe_largest(found: Mapping[str, float]) -> bool:
    return bool(found) and found.get("/PE", 0.0) >= 1.75 and found["/PE"] == max(found.values())


def fig14(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 14: JCT of long requests without each part."""
    runs = _prepared(options, ("PecSched", *ABLATIONS))
    paper = {"/PE": "0.86 to 0.82", "/Dis": "1.21 to 1.29", "/CoL": "1.23 to 1.26", "/FSP": "1.39 to 1.55"}
    rows = []
    for regime in REGIMES:
        rows.append(
            judge(
                f"{regime}: mean JCT of long requests, order of /FSP, PecSched and /PE, mean of models",
                {part: paper[part] for part in ("/FSP", "/PE")},
                order(
                    "/FSP above PecSched above /PE",
                    lambda found: bool(found) and found.get("/FSP", 0.0) > 1.0 > found.get("/PE", 1.0),
                ),
                _default(_without(runs, regime, "long_jct_s", "default")),
            )
        )
        for part in ("/Dis", "/CoL", "/FSP"):
            found = _part(runs, part, regime, "default")
            notes = ["Efficiency of attention in a ring decides this."] if part == "/FSP" else []
            rows.append(
                judge(
                    f"{regime}: mean JCT of long requests, {part} over PecSched",
                    paper[part],
                    _all("above 1 for every model", low=1.0),
                    _default(found),
                    " ".join(filter(None, [*notes, _left_out(runs.names, found)])),
                )
            )
    return ExperimentReport(source=runs.source(REGIMES), rows=tuple(rows))


def _part(runs: PecSchedStudy, part: str, regime: Regime, mode: Mode) -> dict[str, float]:
    return runs.ratios(part, "PecSched", mode, regime, "long_jct_s")


def table6(options: RunOptions) -> ExperimentReport:
    """Reproduce Table 6: suspensions of long requests."""
    runs = _prepared(options, ("PecSched", *ABLATIONS))
    rows = []
    for regime in REGIMES:
        rows += [
            judge(
                f"{regime}: suspensions of long requests under PecSched",
                SUSPENSIONS["PecSched"],
                order("thousands", lambda found: bool(found) and min(found.values()) > 1000),
                {mode: runs.values("PecSched", mode, regime, "pauses") for mode in MODES},
                "The paper's number of requests is not stated.",
            )
        ]
        rows += [
            judge(
                f"{regime}: suspensions, {part} over PecSched",
                SUSPENSIONS[part],
                _all("above 1 for every model", low=1.0),
                _default(_suspended(runs, part, regime, "default")),
            )
            for part in ("/Dis", "/CoL", "/FSP")
        ]
    return ExperimentReport(source=runs.source(REGIMES), rows=tuple(rows))


def _suspended(runs: PecSchedStudy, part: str, regime: Regime, mode: Mode) -> dict[str, float]:
    return runs.ratios(part, "PecSched", mode, regime, "pauses")


def _panels(runs: PecSchedStudy, systems: tuple[str, ...]) -> tuple[PlotPanel, ...]:
    return tuple(
        PlotPanel(
            title=f"Queueing of short requests, {name}, {regime}",
            x="percentile",
            y="seconds",
            log_y=True,
            lines={system: [(cut, _delay_s(runs, name, system, regime, cut)) for cut in CUTS] for system in systems},
        )
        for name in runs.names
        for regime in REGIMES
    )


def _delay_s(runs: PecSchedStudy, name: str, system: str, regime: Regime, cut: int) -> float:
    """Return a value of at least 0.1 ms, for a logarithmic axis."""
    return max(1e-4, runs.value(name, system, "default", regime, "delay_s", f"p{cut}") or 0.0)
