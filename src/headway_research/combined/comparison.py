"""The ladder against the placements of papers: where it wins, and where it does not.

The claims: the most first tokens in time and the least mean TTFT of all; the P99 of all, which the longest prompts set,
near Tetris's; short requests wait no longer than under PecSched.

Nothing is tuned per row, and no paper has these figures: claims are ours, rules were written before the runs. Two
settings:

tetris  Tetris's three workloads on its 16 A100s (Llama-3 8B), prefill only (`tetris.setting`). Chunks on groups, and
        iterations inside instances, both take what Eq. (1), fitted to the paper's Table 1, says. 1,500 requests a run,
        the first tenth left out; two loads a workload, one easy and one at Fixed-SP8's knee or above.
azure   PecSched's rewriting of Azure's conversations (`pecsched.setting`): Yi 34B on 32 A100s, tp 4; seven instances
        prefill and one decodes for Tetris, PecSched and Ladder, eight do both for FIFO and JSQ. Times as there. Outputs
        are Azure's. Requests of the first four fifths of the window count; one without a first token when it ends
        counts with what it has waited.

Ladder and JSQ have the same schedulers (LARS, adaptive chunks), of which those that never decode aim at 0.25 s an
iteration and those that do at 0.05 s. A first token is in time within max(1 s, 5·w) of arrival, w the prompt's fastest
prefill on any group of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.medha import MedhaConfig
from headway.policy.placement.contract import ClusterInstance
from headway.policy.placement.registry import make_placement
from headway.sim.cluster.build import cluster_of, run_cluster
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.cluster.state import ClusterResult
from headway.sim.metrics import RequestRecord, ttft_s
from headway.sim.report.page import ReportChart
from headway.sim.scenario import parse_scenario
from headway.sim.spec import InstanceSpec
from headway.sim.workload import TraceRequest
from headway_research.base import ClaimRow, ExperimentReport, RunOptions, SimulationCache, as_words, source
from headway_research.pecsched import setting as pecsched_setting
from headway_research.tetris import setting as tetris_setting
from headway_research.verdicts import VerdictRule, at_most, judge, order

Setting = Literal["tetris", "azure"]
# requests a second by workload: an easy load, and one at Fixed-SP8's knee or above
LOADS: Mapping[str, tuple[float, float]] = {"short": (2.0, 5.5), "medium": (1.5, 3.5), "long": (0.75, 2.0)}
REGIMES: tuple[pecsched_setting.Regime, ...] = ("unsaturated", "busy")
# (requests a second, improvement rate) of Tetris
RATES = ((0.5, 0.1), (1.5, 0.2), (2.5, 0.4), (3.5, 0.6))
AZURE_RATE = 0.5
MODEL = "Yi 34B"
# iteration targets of instances that never decode, and of those that do
ALONE_S, BESIDE_DECODES_S = 0.25, 0.05
# size of a run: requests in setting `tetris`, seconds in setting `azure`
REQUESTS, WINDOW_S = 1500, 600.0
SEEDS = (0,)
# classes of setting `tetris` by prompt tokens: up to SHORT, and from LONG on
SHORT, LONG = 16_384, 65_536
SYSTEMS = ("FIFO", "JSQ-Medha", "PecSched", "Tetris", "Ladder")
PLACEMENTS = {"FIFO": "fifo", "JSQ-Medha": "jsq", "PecSched": "pecsched", "Tetris": "tetris", "Ladder": "ladder"}


class CombinedPoint(NamedTuple):
    """The inputs of one simulation."""

    setting: Setting
    where: str
    """A workload of Tetris's, or a regime of PecSched's."""
    rps: float
    """Requests a second; 0 in setting `azure`, where the regime sets them."""
    system: str
    size: float
    """Number of requests in setting `tetris`, seconds of the window in setting `azure`."""
    seed: int


class CombinedResult(NamedTuple):
    """The figures of one simulation: TTFT in seconds by class, and shares of requests in time."""

    short_p50: float
    short_p99: float
    long_p50: float
    in_time: float
    short_in_time: float
    long_in_time: float
    pauses: int
    """Preemptions of long prefills."""
    mean: float
    """Mean TTFT of all requests."""
    p99: float
    """P99 of all requests' TTFT."""


def run_point(point: CombinedPoint) -> CombinedResult:
    """Simulate."""
    return _tetris(point) if point.setting == "tetris" else _azure(point)


# -- Tetris's cluster --------------------------------------------------------------------------------------------------


def _tetris(point: CombinedPoint) -> CombinedResult:
    base = tetris_setting.prefill_cluster("8b")
    mixed = point.system in ("FIFO", "JSQ-Medha")
    policy = "fcfs" if point.system in ("FIFO", "PecSched") else "lars"
    config = SchedulerConfig(policy=policy, t_target_s=ALONE_S, medha=MedhaConfig(space_sharing=policy == "lars"))
    model = tetris_setting.instance_latency(base.spans)  # type: ignore[arg-type]
    instances = [
        ClusterInstance(id=i, node=i // 8, role="mixed" if mixed else "prefill", capacity=1 << 22) for i in range(16)
    ]
    if not mixed:
        instances.append(ClusterInstance(id=16, node=2, role="decode", tp=8, capacity=1 << 22))
    spec = replace(
        base,
        instances=tuple(instances),
        engine=lambda group: InstanceSpec(config=config, latency=model, kv_tokens=len(group) << 22),
    )
    placement = make_placement(
        PLACEMENTS[point.system],
        spec.policy_context,
        _options(point.system, {"rates": RATES}, 8),
    )
    workload = tetris_setting.requests_of(point.where, point.rps, int(point.size), point.seed)
    result = simulate_cluster(spec, placement, workload)
    # the first tenth finds an empty cluster
    records = result.sim.records[len(workload) // 10 :]
    shorts = [r for r in records if r.prompt_tokens <= SHORT]
    longs = [r for r in records if r.prompt_tokens >= LONG]
    return _measured(records, shorts, longs, result, _TtftDeadlines(spec.spans, 16, 8), float("inf"))


def _options(system: str, tetris: dict[str, Any], long_sp: int) -> dict[str, Any]:
    if system == "Tetris":
        return tetris
    if system in ("JSQ-Medha", "Ladder"):
        return {}
    return {"long_sp": long_sp, **({"long_replicas": "fixed"} if system == "PecSched" else {})}


# -- PecSched's --------------------------------------------------------------------------------------------------------


def scenario(system: str, regime: pecsched_setting.Regime, window_s: float) -> dict[str, Any]:
    """Return a point of setting `azure` as a scenario's data, as `headway simulate` takes it."""
    if system in ("FIFO", "PecSched"):
        return pecsched_setting.scenario(MODEL, system, "default", regime, window_s)
    base = "FIFO" if system == "JSQ-Medha" else "PecSched"
    data = pecsched_setting.scenario(MODEL, base, "default", regime, window_s)
    options = _options(system, {"rate": AZURE_RATE}, 0)
    aim_s = BESIDE_DECODES_S if system == "JSQ-Medha" else ALONE_S
    policy = {
        "policy": "lars",
        "chunking": "adaptive",
        "t_target_s": aim_s,
        "medha": {},
        "max_num_seqs": 512,
    }
    cluster = {**data["cluster"], "placement": PLACEMENTS[system], "options": options}
    # Tetris and Ladder take the KV that memory leaves on the decode instance, not PecSched's fixed size
    if system != "JSQ-Medha":
        prefill, decode = cluster["pools"]
        cluster["pools"] = [prefill, {k: v for k, v in decode.items() if k != "kv_tokens"}]
    return {**data, "name": f"{system}, {MODEL}, {regime}", "cluster": cluster, "policy": policy}


def _azure(point: CombinedPoint) -> CombinedResult:
    data = parse_scenario(scenario(point.system, point.where, point.size))  # type: ignore[arg-type]
    result = run_cluster(data, point.seed)
    end_s = result.sim.duration_s
    # requests of the last fifth have had too little time
    records = [r for r in result.sim.records if r.arrival_s < 0.8 * end_s]
    shorts, longs = ([r for r in records if r.klass == klass] for klass in ("short", "long"))
    spans = cluster_of(data, [TraceRequest(0.0, 1, 1)]).spans
    return _measured(records, shorts, longs, result, _TtftDeadlines(spans, 7, 2), end_s)


# -- figures of a run --------------------------------------------------------------------------------------------------


class _TtftDeadlines:
    """Deadline of the first token: max(1 s, 5·w), w the fastest prefill on a group of 1, 2, 4, … up to `count`."""

    def __init__(self, spans: GroupLatency, count: int, per_node: int) -> None:
        sizes = [1 << k for k in range(8) if 1 << k <= count]
        shapes = [GroupShape(sp, -(-sp // per_node)) for sp in sizes]

        @cache
        def fastest_s(tokens: int) -> float:
            return min(spans.prefill_s(0, tokens, shape) for shape in shapes)

        self._fastest_s = fastest_s

    def __call__(self, record: RequestRecord) -> float:
        return max(1.0, 5.0 * self._fastest_s(record.prompt_tokens))


def _measured(
    records: Sequence[RequestRecord],
    shorts: Sequence[RequestRecord],
    longs: Sequence[RequestRecord],
    result: ClusterResult,
    due: _TtftDeadlines,
    end_s: float,
) -> CombinedResult:
    def wait_s(record: RequestRecord) -> float:
        first = ttft_s(record)
        return end_s - record.arrival_s if first is None else first

    def cut(of: Sequence[RequestRecord], percent: int) -> float:
        return float(np.percentile([wait_s(record) for record in of], percent)) if of else 0.0

    def in_time(of: Sequence[RequestRecord]) -> float:
        return fmean(wait_s(record) <= due(record) for record in of) if of else 1.0

    return CombinedResult(
        cut(shorts, 50),
        cut(shorts, 99),
        cut(longs, 50),
        in_time(records),
        in_time(shorts),
        in_time(longs),
        result.paused,
        fmean(map(wait_s, records)),
        cut(records, 99),
    )


RESULTS: SimulationCache[CombinedPoint, CombinedResult] = SimulationCache()


class CombinedStudy:
    """All points of one setting."""

    def __init__(self, options: RunOptions, setting: Setting) -> None:
        self.setting = setting
        self.seeds = options.seeds or SEEDS
        places: Iterable[tuple[str, float]] = ((regime, 0.0) for regime in REGIMES)
        self.size = options.window_s or (20.0 if options.quick else WINDOW_S)
        if setting == "tetris":
            places = ((name, rps) for name, loads in LOADS.items() for rps in loads)
            self.size = 40 if options.quick else REQUESTS
        self.places = list(places)[:1] if options.quick else list(places)
        points = (
            CombinedPoint(setting, where, rps, system, self.size, seed)
            for where, rps in self.places
            for system in SYSTEMS
            for seed in self.seeds
        )
        RESULTS.ensure(points, run_point, options.jobs, options.on_progress)

    def value(self, place: tuple[str, float], system: str, what: str) -> float:
        """Return the mean over seeds of a field of `CombinedResult`."""
        points = (CombinedPoint(self.setting, *place, system, self.size, seed) for seed in self.seeds)
        return fmean(getattr(RESULTS[point], what) for point in points)

    def values(self, place: tuple[str, float], what: str) -> dict[str, float]:
        """Return a field of `CombinedResult` by system, means over seeds."""
        return {system: self.value(place, system, what) for system in SYSTEMS}


# -- claims ------------------------------------------------------------------------------------------------------------


LONGEST = 1.25
"""Bound of the P99 of all requests, which are the longest prompts, over Tetris's."""


def tetris(options: RunOptions) -> ExperimentReport:
    """Compare the systems on Tetris's workloads."""
    runs = CombinedStudy(options, "tetris")
    latency = "Eq. (1) fitted to Tetris's Table 1 (c = 2d), for groups and for iterations of one instance"
    where = (
        "Llama-3 8B, 16 A100 prefill instances on two nodes, Tetris-like lengths, Poisson, "
        f"{int(runs.size)} requests a run; short: up to 16K tokens, long: from 64K on; improvement rates {RATES}"
    )
    return _report(runs, source(latency, where, runs.seeds))


def azure(options: RunOptions) -> ExperimentReport:
    """Compare the systems on PecSched's rewriting of Azure's conversations."""
    runs = CombinedStudy(options, "azure")
    latency = "fitted A100 operator profiles inside instances (tp 4); groups: fast-SP formulas, corrected"
    where = (
        f"{MODEL}, 32 A100, tp 4; Azure-like short requests, 100K to 500K uniform long ones; improvement rate "
        f"{AZURE_RATE}"
    )
    shown = scenario("Ladder", REGIMES[0], runs.size)
    return _report(runs, source(latency, where, runs.seeds, runs.size, as_scenario_file=shown))


def _report(runs: CombinedStudy, origin: dict[str, Any]) -> ExperimentReport:
    rows = [row for place in runs.places for row in _rows(runs, place)]
    titles = {"mean": "Mean TTFT", "p99": "P99 TTFT", "in_time": "First tokens in time"}
    panels = tuple(_panel(runs, what, title) for what, title in titles.items())
    return ExperimentReport(source=origin, rows=tuple(rows), panels=panels)


def named(setting: Setting, place: tuple[str, float]) -> str:
    """Return the name of a workload and load, for claims and axes."""
    return f"{place[0]}, {place[1]:g} requests/s" if setting == "tetris" else place[0]


def _rows(runs: CombinedStudy, place: tuple[str, float]) -> list[ClaimRow]:
    where = named(runs.setting, place)
    shorts, longs = runs.values(place, "short_p50"), runs.values(place, "long_p50")
    short, p99 = runs.values(place, "short_p99"), runs.values(place, "p99")
    pauses = f"{runs.value(place, 'Ladder', 'pauses'):g} and {runs.value(place, 'PecSched', 'pauses'):g}"
    return [
        _own(
            f"{where}: share of first tokens in time",
            order("Ladder's the largest", lambda v: v["Ladder"] >= max(v.values())),
            runs.values(place, "in_time"),
            f"Of short ones: {as_words(runs.values(place, 'short_in_time'))}. "
            f"Of long ones: {as_words(runs.values(place, 'long_in_time'))}.",
        ),
        _own(
            f"{where}: mean TTFT, s",
            order("Ladder's the least", lambda v: v["Ladder"] <= min(v.values())),
            runs.values(place, "mean"),
            f"Medians of short ones: {as_words(shorts)}. Of long ones: {as_words(longs)}.",
        ),
        _own(
            f"{where}: P99 TTFT of all requests, Ladder over Tetris",
            at_most(LONGEST),
            p99["Ladder"] / p99["Tetris"] if p99["Tetris"] else None,
            f"Seconds: {as_words(p99)}.",
        ),
        _own(
            f"{where}: P99 TTFT of short requests, s",
            order("Ladder's at most PecSched's", lambda v: v["Ladder"] <= v["PecSched"]),
            short,
            f"Groups were paused {pauses} times under the ladder and PecSched.",
        ),
    ]


def _own(claim: str, check: VerdictRule, value: Any, note: str = "") -> ClaimRow:
    """Return the row of a claim of our own: all systems run in default mode, and no paper has a number."""
    return judge(claim, "no paper has it", check, {"paper": None, "default": value}, note)


def _panel(runs: CombinedStudy, what: str, title: str) -> ReportChart:
    lines = {
        system: [(k, max(1e-3, runs.value(place, system, what))) for k, place in enumerate(runs.places)]
        for system in SYSTEMS
    }
    places = "; ".join(f"{k}: {named(runs.setting, place)}" for k, place in enumerate(runs.places))
    return ReportChart(
        title=title, x=places, y="share" if what == "in_time" else "s", lines=lines, log_y=what != "in_time"
    )
