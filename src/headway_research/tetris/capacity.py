"""Tetris Fig. 8, 9 and 10: capacity of each system, TTFT and throughput at the critical rates, and noise. Fig. 11 and
12: improvement rates by load. Fig. 13: chunked against single-chunk plans.

The paper normalises to 25 times the light-load latency and does not say whose; here it is Tetris's own at 0.1 requests
a second, for P50 and P99 apart. The 25× crossing lies past the knee, where it depends on how long a run is, so 5×
stands beside it.

`LoongServe disaggregated` is what Tetris §2.4 and §7.1 describe: each request by itself, when it arrives, on the group
that ends it first. What LoongServe published schedules in rounds by dynamic programming: `loongserve` below compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from headway.sim import metrics
from headway.sim.build import run_scenario
from headway.sim.metrics import percentiles
from headway.sim.report.page import ReportChart
from headway.sim.scenario import parse_scenario
from headway_research.base import ClaimRow, ExperimentReport, RunOptions
from headway_research.tetris.setting import TetrisStudy
from headway_research.verdicts import at_least, at_most, band, judge_same, order

NOISE = 0.3
VARIANTS = (
    "Fixed-SP16", "LoongServe disaggregated", "LoongServe, rounds", "LoongServe, batches", "Fixed-SP8", "Tetris",
)  # fmt: skip
VARIANT_REQUESTS = 1000
NOISY_LOADS: Mapping[str, tuple[float, ...]] = {"short": (4.0,), "medium": (3.0,), "long": (1.75,)}


def systems(cluster: str) -> list[str]:
    """Return the systems compared, worst first as the paper has them for the 8B."""
    names = ["Fixed-SP16", "LoongServe disaggregated", "Fixed-SP8", "Tetris"]
    return names if cluster == "8b" else names[1:]


def each(
    options: RunOptions, systems_of: Callable[[str], Sequence[str]] = systems
) -> Iterator[tuple[TetrisStudy, str]]:
    """Yield (study, workload) of both clusters, simulated for their systems."""
    for cluster in ("8b", "70b"):
        runs = TetrisStudy(options, cluster)
        runs.ensure(systems_of(cluster))
        yield from ((runs, workload) for workload in runs.workloads)


def fig8(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 8: capacity of each system."""
    rows: list[ClaimRow] = []
    panels, sources = [], {}
    for runs, workload in each(options):
        names = systems(runs.cluster)
        sources[runs.cluster] = runs.source()
        for times in (25.0, 5.0):
            rows += _capacity(runs, names, runs.cluster, workload, times)
        panels.append(_panel(runs, names, runs.cluster, workload))
    source = sources["8b"] | {"latency_70b": sources["70b"]["latency"]}
    return ExperimentReport(source=source, rows=tuple(rows), panels=tuple(panels))


def _capacity(runs: TetrisStudy, names: list[str], cluster: str, workload: str, times: float) -> list[ClaimRow]:
    at = {name: runs.crossing(name, workload, times) for name in names}
    found = {name: rps for name, rps in at.items() if rps is not None}
    what = f"{cluster.upper()}, {workload}"
    rows = []
    if cluster == "8b":
        rising = order("rises in this order", lambda v: len(v) == len(names) and list(v.values()) == sorted(v.values()))
        rows.append(
            judge_same(
                f"{what}: requests/s where P50 TTFT exceeds {times:g}× light load",
                "SP16 < LoongServe < SP8 < Tetris",
                rising,
                found,
            )
        )
    gain = found["Tetris"] / found["Fixed-SP8"] - 1 if {"Tetris", "Fixed-SP8"} <= found.keys() else None
    claim = f"{what}: Tetris over Fixed-SP8 at {times:g}×"
    if times == 25.0:
        paper = "+20% to +45%" if cluster == "8b" else "+21% to +43%, over LoongServe"
        rows.append(judge_same(claim, paper, band(0.15, 0.6), gain))
    else:
        rows.append(judge_same(claim, None, band(0.0, 1.0), gain))
    return rows


def fig9(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 9: TTFT at the highest load that the best baseline carries within 5× of light load."""
    rows: list[ClaimRow] = []
    claims = {"8b": ("1.64-2.78×", "1.52-3.13×"), "70b": ("2.86-4.17×", "2.27-4.35×")}
    for runs, workload in each(options):
        rps = max(_within(runs, "Fixed-SP8", workload), default=runs.loads(workload)[0])
        for what, claim in zip(("p50", "p99"), claims[runs.cluster], strict=True):
            at = {name: runs.value(name, workload, rps, what) for name in systems(runs.cluster)}
            rows.append(
                judge_same(
                    f"{runs.cluster.upper()}, {workload}, {rps:g}/s: {what.upper()} TTFT over Tetris's",
                    claim,
                    order("above 1 for each", lambda v: min(v.values()) > 1),
                    {name: value / at["Tetris"] for name, value in at.items() if name != "Tetris"},
                    "How large depends on where critical is put.",
                )
            )
    return ExperimentReport(source=TetrisStudy(options, "8b").source(), rows=tuple(rows))


def fig10(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 10: prompt tokens a second at the highest load that each system carries within 5×."""
    rows: list[ClaimRow] = []
    above = order("above 1 for each", lambda v: bool(v) and min(v.values()) > 1)
    for runs, workload in each(options):
        carried = {name: max(_within(runs, name, workload), default=None) for name in systems(runs.cluster)}
        at = {name: runs.value(name, workload, rps, "tokens_per_s") for name, rps in carried.items() if rps is not None}
        ratios = {name: at["Tetris"] / rate for name, rate in at.items() if name != "Tetris" and "Tetris" in at}
        what = f"{runs.cluster.upper()}, {workload}: Tetris's tokens/s over others', each at its critical rate"
        rows.append(judge_same(what, "1.24-3.38×" if runs.cluster == "8b" else "1.15-1.81×", above, ratios))
    return ExperimentReport(source=TetrisStudy(options, "8b").source(), rows=tuple(rows))


def noise(options: RunOptions) -> ExperimentReport:
    """Compare anchored plans, open-loop plans and rates profiled under noise, at 30% execution noise."""
    runs, rows = TetrisStudy(options, "8b"), []
    loads = {workload: NOISY_LOADS[workload] for workload in runs.workloads}
    knowing = "Tetris, rates under noise"
    names = ["Fixed-SP8", "Tetris", "Tetris, open loop", knowing]
    runs.ensure(names, loads, NOISE)
    for workload, (rps,) in loads.items():
        for what in ("p50", "p99"):
            found = {name: runs.value(name, workload, rps, what, NOISE) for name in names}
            claim = f"{workload}, {rps:g} req/s, 30% noise: {what.upper()} TTFT, s"
            rows += [
                judge_same(
                    claim,
                    None,
                    order("Tetris ahead of Fixed-SP8", lambda v: v["Tetris"] < v["Fixed-SP8"]),
                    {name: found[name] for name in names[:-1]},
                    "Open loop plans on its own predictions and never hears when spans really ended.",
                ),
                judge_same(
                    f"{claim}, improvement rates profiled under that noise",
                    None,
                    order("Tetris ahead of Fixed-SP8", lambda v: v[knowing] < v["Fixed-SP8"]),
                    {name: found[name] for name in (names[0], knowing)},
                ),
            ]
    return ExperimentReport(source=runs.source(noise="lognormal, 0.3"), rows=tuple(rows))


def loongserve(options: RunOptions) -> ExperimentReport:
    """Compare three variants of LoongServe with fixed sizes and Tetris, and one pool for both phases with two pools."""
    runs, rows = TetrisStudy(options, "8b", VARIANT_REQUESTS, every=2), []
    runs.seeds = runs.seeds[:1]
    runs.ensure(VARIANTS)
    for workload in runs.workloads:
        for times in (5.0, 25.0):
            top = runs.loads(workload)[-1]
            # a system that does not cross within the grid counts with the grid's end
            found = {name: runs.crossing(name, workload, times) or top for name in VARIANTS}
            what = f"8B, {workload}: requests/s (to {top:g}) where P50 TTFT exceeds {times:g}× light load"
            for name in VARIANTS[1:4]:
                mine = {key: found[key] for key in ("Fixed-SP16", name, "Fixed-SP8", "Tetris")}
                rising = order("rises in this order", lambda v: list(v.values()) == sorted(v.values()))
                rows.append(judge_same(f"{what} ({name})", "SP16 < LoongServe < SP8 < Tetris", rising, mine))
    rows += _unified(options)
    panels = tuple(_panel(runs, list(VARIANTS), "8b", workload) for workload in runs.workloads)
    return ExperimentReport(
        source=runs.source(decodes="fitted A100 profiles", as_scenario_file=unified("pool")),
        rows=tuple(rows),
        panels=panels,
    )


def unified(which: str, requests: int = 300) -> dict[str, Any]:
    """Return the scenario of medium lengths at 2 requests/s on four nodes.

    which: `pool`, LoongServe over all 32 instances of TP1, which also decode; `apart`, its rounds on 16 instances, and
    two decode instances of TP8.
    """
    pool = [{"role": "mixed", "count": 32, "tp": 1, "per_node": 8}]
    apart = [{"role": "prefill", "count": 16, "tp": 1, "per_node": 8}, {"role": "decode", "count": 2, "tp": 8}]
    return {
        "name": f"LoongServe, {which}, Llama-3 8B, medium",
        "cluster": {
            "accelerator": "a100-80gb",
            "placement": "loongserve",
            "options": {"prefill": "single", "max_sp": 16},
            "pools": pool if which == "pool" else apart,
            "spans": {"source": "tetris-table1"},
            "masters": "all",
        },
        "model": "llama-3-8b",
        "latency": {"source": "fitted"},
        "workload": {"preset": "tetris-medium", "qps": 2.0, "requests": requests, "arrivals": "poisson"},
    }


def _unified(options: RunOptions) -> list[ClaimRow]:
    found: dict[str, tuple[float, float]] = {}
    for which in ("pool", "apart"):
        records = run_scenario(parse_scenario(unified(which, 30 if options.quick else 300)), 0).sim.records
        records = records[len(records) // 10 :]
        ttft = percentiles(metrics.ttft_s(record) for record in records)["p50"]
        tpot = percentiles(metrics.tpot_s(record) for record in records)["p50"]
        found[which] = (ttft or 0.0, tpot or 1.0)
    one, other = found["pool"], found["apart"]
    return [
        judge_same(
            "8B, medium, 2/s: median TTFT of LoongServe apart from decodes over that of one pool of all instances",
            "marginal gains of one pool",
            band(1.0, 1.5),
            other[0] / one[0],
            "Rounds in both; one pool has twice the instances to prefill on, less those that decode.",
        ),
        judge_same(
            "8B, medium, 2/s: median TPOT of one pool (TP1) over decode instances of TP8",
            "1.55× to 1.67×",
            band(1.2, 2.2),
            one[1] / other[1],
            "Decode batches are packed on few instances; TP8 reads weights eight times as fast.",
        ),
    ]


def _within(runs: TetrisStudy, system: str, workload: str) -> list[float]:
    """Return the rates of the grid at which a system stays within 5× of light load."""
    limit = 5 * runs.light(workload, "p50")
    return [rps for rps in runs.loads(workload) if runs.value(system, workload, rps, "p50") <= limit]


def _panel(runs: TetrisStudy, names: list[str], cluster: str, workload: str) -> ReportChart:
    loads = runs.loads(workload)
    knees = {name: runs.crossing(name, workload, 5.0) for name in names}
    lines = {name: [(rps, runs.value(name, workload, rps, "p50")) for rps in loads] for name in names}
    at = 5.0 * runs.light(workload, "p50")
    lines["5× light load"] = [(rps, at) for rps in knees.values() if rps is not None]
    return ReportChart(title=f"{cluster.upper()}, {workload}", x="requests/s", y="P50 TTFT, s", lines=lines, log_y=True)


# -- improvement rates, and chunks -------------------------------------------------------------------------------------


FIXED = (0.1, 0.3, 0.5, 0.7)
STEP = 0.1


def fig11(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 11: improvement rates on Llama-3 8B."""
    return _rates(options, "8b")


def fig12(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 12: improvement rates on Llama-3 70B."""
    return _rates(options, "70b")


def _rates(options: RunOptions, cluster: str) -> ExperimentReport:
    runs = TetrisStudy(options, cluster)
    fixed = [f"Tetris, rate {rate}" for rate in FIXED]
    runs.ensure(["Tetris", *fixed])
    rows, panels = [], []
    for workload in runs.workloads:
        table = {f"{load:g}": rate for load, rate in runs.rates(workload)}
        steps = order(f"rises with load, but for steps of {STEP}", _rising)
        rows.append(
            judge_same(f"{workload}: profiled rate by requests/s", "small at low load, large at high", steps, table)
        )
        loads = [
            rps for rps in runs.loads(workload) if runs.value("Tetris", workload, rps, "p50") <= _limit(runs, workload)
        ]
        loads = loads or list(runs.loads(workload)[:1])
        over = {
            name: [
                (rps, runs.value(name, workload, rps, "mean") / runs.value("Tetris", workload, rps, "mean"))
                for rps in loads
            ]
            for name in fixed
        }
        rows.append(
            judge_same(
                f"{workload}: mean TTFT of dynamic rates over the best fixed one's, worst load",
                "near-optimal at all loads",
                at_most(1.1),
                max(1 / min(line[k][1] for line in over.values()) for k in range(len(loads))),
            )
        )
        rows.append(
            judge_same(
                f"{workload}: the worst fixed rate's mean TTFT over dynamic ones', worst load",
                "well above 1",
                at_least(1.1),
                max(max(y for _, y in line) for line in over.values()),
            )
        )
        panels.append(ReportChart(title=workload, x="requests/s", y="mean TTFT over dynamic rates", lines=over))
    return ExperimentReport(source=runs.source(), rows=tuple(rows), panels=tuple(panels))


def fig13(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 13: single-chunk plans under the same rates."""
    rows, panels = [], []
    single = "Tetris, single chunk"
    claims = {"8b": ("2.33-4.17×", "2.64-3.58×"), "70b": ("2.71-4.77×", "2.43-3.23×")}
    for runs, workload in each(options, lambda cluster: ["Tetris", single]):
        where = f"{runs.cluster.upper()}, {workload}"
        lines = {
            what.upper(): [
                (rps, runs.value(single, workload, rps, what) / runs.value("Tetris", workload, rps, what))
                for rps in runs.loads(workload)
            ]
            for what in ("p50", "p99")
        }
        rows += [
            judge_same(
                f"{where}: single-chunk {what} TTFT over CDSP's, worst load",
                f"up to {claim}",
                at_least(2.0),
                max(y for _, y in line),
                "Eq. (1)'s constant is paid by each chunk (0.39 s at SP 16), and Algorithm 1 keeps chunks inside the "
                "single-chunk group: few requests are cut.",
            )
            for (what, line), claim in zip(lines.items(), claims[runs.cluster], strict=True)
        ]
        panels.append(ReportChart(title=where, x="requests/s", y="slowdown", lines=lines))
    return ExperimentReport(source=TetrisStudy(options, "8b").source(), rows=tuple(rows), panels=tuple(panels))


def _limit(runs: TetrisStudy, workload: str) -> float:
    return 25 * runs.light(workload, "p50")


def _rising(table: dict[str, float]) -> bool:
    """A rate may fall by a step; the last third lies above the first."""
    rates = list(table.values())
    third = max(1, len(rates) // 3)
    return all(b >= a - STEP - 1e-9 for a, b in pairwise(rates)) and sum(rates[-third:]) >= sum(rates[:third])
