"""The packing-prefetch paper at service level: case study 3 (Fig. 7) and case study 4 (Fig. 8).

The real scheduler as Sarathi-Serve has it (decodes first, first come first served, a budget of `chunk` tokens that
decodes count against), in virtual time. Limits: the 99th percentile of gaps within the paper's rule (32 decodes over
4K tokens, alone), and of scheduling delays within a second. Chats are ShareGPT-like; the paper's arXiv set is not
public: a log-normal with Table II's medians and P90s, cut at 16K tokens in all. (Table II's two deviations of outputs
look swapped: ShareGPT's outputs have 265.)

paper mode: preset `paper`, KV for 128K tokens as the paper says. default mode: the real model, the KV that HBM holds
beside its weights. What the paper leaves open (the cost of a chunk's history, admission of KV, which gaps count) is
answered as the scheduler does it, and fitted to nothing: sizes do not come out, orderings do.

Which gains are reachable at all (`sensitivity`): both case studies over what is left open. What a chunk pays for its
history: 1 as computed, 2 as if each chunk attended to the whole prompt, 2.5 where the gain for arXiv comes out. How KV
is admitted: 128K tokens in all ("configured to hold the KV-cache for one batch of 128K tokens"), or without a limit, as
"the total KV-cache size can range from 10K to 128K tokens" may mean. Which gaps count towards the P99: all of them, or
none (`saturated`, where delays alone limit). Llama-3.1-8B on arXiv in paper mode; 250 requests and a precision of 5%,
coarser than the case studies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from headway.perf.latency.base import Seconds
from headway.sim.report.page import ReportChart
from headway.sim.workload import TraceRequest
from headway.sim.workload.generate import LogNormalLengths, arrivals, preset, simple
from headway_research.accelerator.serving import (
    AcceleratorLatency,
    CapacityResult,
    ServiceLimits,
    at_rate,
    bandwidth_to_match,
    capacity,
    instance,
    kv_capacity,
    sarathi,
)
from headway_research.accelerator.stage import Mode as Schedule
from headway_research.accelerator.stage_figures import setting, slo_s
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions, SimulationCache, source
from headway_research.verdicts import at_least, band, both, judge, only, order

MODELS, SETS = ("llama-3.1-8b", "llama-3.1-70b"), ("arxiv", "sharegpt")
REQUESTS, QUICK_REQUESTS = 1000, 24
KV_TOKENS = 128 * 1024
MOST_TOKENS = 16_384
TIGHT_S = 0.031
SCHEDULES: tuple[Schedule, Schedule] = ("packing", "prefetch")
OPEN_REQUESTS, HISTORY, ADMISSION = 250, (1.0, 2.0, 2.5), {"128K": KV_TOKENS, "any": 1 << 24}
OPEN: dict[str, tuple[int, str, float, float]] = {
    "case 3, chunks of 512 within the SLO": (512, "slo", 2.4, 2.16),
    "case 4, chunks of 1024 within 31 ms": (1024, "tight", 3.0, 2.7),
    "case 4, chunks of 1024 saturated": (1024, "none", 1.53, 1.38),
}
"""Figures that hang on what is open: (chunk, limit of gaps, the paper's gain, the least that counts as it)."""


@cache
def requests(name: str, count: int, seed: int) -> tuple[TraceRequest, ...]:
    """Draw a data set's requests with Poisson arrivals at one a second."""
    arxiv = simple(LogNormalLengths.of(7059, 12985, 1, MOST_TOKENS), LogNormalLengths.of(208, 371, 1, 1024))
    mix = arxiv if name == "arxiv" else preset("sharegpt-like")
    drawn = mix.draw(np.random.default_rng([seed, 1]), arrivals("poisson", 1.0), count)
    return tuple(
        TraceRequest(r.arrival_s, min(r.prompt_tokens, MOST_TOKENS - r.output_tokens), r.output_tokens) for r in drawn
    )


@dataclass(frozen=True)
class CapacityTask:
    """One capacity search, or one search of the bandwidth that matches a rate."""

    mode: Mode
    model: str
    data: str
    """Data set."""
    schedule: Schedule
    chunk: int = 512
    limit: str = "slo"
    """TBT limit: slo (the paper's rule), tight (31 ms) or none."""
    match: float | None = None
    """Rate for which to search the bandwidth that packing alone needs, in place of a capacity; None: capacity."""
    kv_tokens: int | None = None
    """KV that is admitted; None: the mode's own."""
    history: float = 1.0
    """What a chunk's history costs, as a multiple of what is computed."""
    ratio: float = 1.02
    """Precision of the search."""


class HistoryCost(AcceleratorLatency):
    """An accelerator on which a chunk's history costs a multiple of what it does."""

    times = 1.0

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        """See AcceleratorLatency."""
        return super().chunk_s(round(past * self.times), first, last)


Capacity = CapacityResult | float | None
RESULTS: SimulationCache[tuple[CapacityTask, int, int], Capacity] = SimulationCache()
"""Results by (task, number of requests, seed)."""


def solve(point: tuple[CapacityTask, int, int]) -> Capacity:
    """Run the search of a (task, number of requests, seed)."""
    task, count, seed = point
    # The TBT limit is the mode's own: the paper defines it as an iteration on the same machine (`slo_s`).
    at = setting(task.mode, task.model)
    limit_s = {"slo": slo_s(task.mode, task.model), "tight": TIGHT_S, "none": None}[task.limit]
    limits = ServiceLimits(tbt_s=limit_s)
    kv_tokens = task.kv_tokens or (KV_TOKENS if task.mode == "paper" else kv_capacity(at))
    drawn = requests(task.data, count, seed)

    def draw(qps: float) -> list[TraceRequest]:
        return at_rate(drawn, qps)

    config = sarathi(task.chunk)
    if task.match is not None:
        return bandwidth_to_match(at, config, kv_tokens, draw, limits, task.match)
    spec = instance(at, task.schedule, config, kv_tokens)
    if task.history != 1.0:
        latency = HistoryCost(at, task.schedule)
        latency.times = task.history
        spec = replace(spec, latency=latency)
    return capacity(spec, draw, limits, ratio=task.ratio)


class CapacityStudy:
    """Cache of capacity searches, computed in parallel over tasks and seeds."""

    def __init__(self, options: RunOptions, requests: int = REQUESTS) -> None:
        self.count = QUICK_REQUESTS if options.quick else requests
        self.seeds = options.seeds or (0,)
        self._options = options

    def ensure(self, tasks: Sequence[CapacityTask]) -> None:
        """Compute the tasks that are not cached yet."""
        points = ((task, self.count, seed) for task in tasks for seed in self.seeds)
        RESULTS.ensure(points, solve, self._options.jobs, self._options.on_progress)

    def answers(self, task: CapacityTask) -> list[Any]:
        self.ensure([task])
        return [RESULTS[task, self.count, seed] for seed in self.seeds]

    def qps(self, task: CapacityTask) -> float:
        """Return the capacity in requests a second, averaged over seeds."""
        return float(np.mean([answer.qps for answer in self.answers(task)]))

    def gain(self, mode: Mode, model: str, data: str, **more: Any) -> float | None:
        """Return the ratio of prefetch's capacity to packing's; None where packing serves no request within limits.

        more: other fields of the tasks."""
        packing, prefetch = (self.qps(CapacityTask(mode, model, data, schedule, **more)) for schedule in SCHEDULES)
        return prefetch / packing if packing else None


class CapacitySearch(CapacityStudy):
    """Case study 3: capacities with chunks of 512, by mode, model, data set and schedule."""

    def __init__(self, options: RunOptions) -> None:
        super().__init__(options)
        self.ensure([CapacityTask(m, n, d, s) for m in MODES for n in MODELS for d in SETS for s in SCHEDULES])
        best = {m: self.qps(CapacityTask(m, MODELS[0], "arxiv", "prefetch")) for m in MODES}
        self._match = {m: CapacityTask(m, MODELS[0], "arxiv", "packing", match=best[m]) for m in MODES if best[m]}
        self.ensure(list(self._match.values()))

    def table(self, mode: Mode) -> dict[str, float]:
        """Return the QPS with prefetch, by model and data set."""
        return {f"{n[10:]} {d}": self.qps(CapacityTask(mode, n, d, "prefetch")) for n in MODELS for d in SETS}

    def bandwidth(self, mode: Mode) -> float | None:
        """Return the multiple of HBM bandwidth at which packing alone serves prefetch's QPS (8B, arXiv)."""
        return self.answers(self._match[mode])[0] if mode in self._match else None

    def gains(self, model: str, mode: Mode) -> dict[str, float]:
        """Return `gain` by data set; infinite where packing serves no request within the limits."""
        return {data: self.gain(mode, model, data) or float("inf") for data in SETS}

    def least_gain(self, mode: Mode) -> float:
        return min(min(self.gains(model, mode).values()) for model in MODELS)


def case3(options: RunOptions) -> ExperimentReport:
    """Reproduce case study 3 (Fig. 7)."""
    runs = CapacitySearch(options)
    panels = [
        ReportChart(
            title=f"P99 gap over the rate, {name[10:].upper()}, paper mode",
            x="requests a second",
            y="ms",
            lines={
                f"{data}, {schedule}": _gaps_by_rate(runs, CapacityTask("paper", name, data, schedule))
                for data in SETS
                for schedule in SCHEDULES
            },
        )
        for name in MODELS
    ]
    return _report(runs, [*_capacity_rows(runs), *_gain_rows(runs)], panels)


def _gaps_by_rate(runs: CapacityStudy, task: CapacityTask) -> list[tuple[float, float]]:
    """Return (requests a second, P99 gap in ms) of every rate that the first seed's search tried."""
    return [(rate.qps, rate.tbt_s * 1e3) for rate in runs.answers(task)[0].tried]


def _capacity_rows(runs: CapacitySearch) -> list[ClaimRow]:
    return [
        judge(
            "Throughput of 8B over 70B, both data sets (QPS with prefetch)",
            "8B higher",
            order("8B higher on both", lambda q: all(q[f"8b {d}"] > q[f"70b {d}"] for d in SETS)),
            both(runs.table),
        ),
        judge(
            "Throughput of ShareGPT over arXiv, both models (QPS with prefetch)",
            "ShareGPT higher",
            order(
                "ShareGPT higher on both",
                lambda q: all(q[f"{name[10:]} sharegpt"] > q[f"{name[10:]} arxiv"] for name in MODELS),
            ),
            both(runs.table),
        ),
        *(
            judge(
                f"arXiv gains more than ShareGPT, {name[10:].upper()}",
                "arXiv gains more",
                order("arXiv's gain is larger", lambda g: g["arxiv"] > g["sharegpt"]),
                both(partial(runs.gains, name)),
            )
            for name in MODELS
        ),
    ]


def _gain_rows(runs: CapacitySearch) -> list[ClaimRow]:
    small, large = MODELS
    packing = {mode: CapacityTask(mode, small, "arxiv", "packing") for mode in MODES}
    gains = (
        (small, "arXiv", 2.4, band(2.16, 2.64)),
        (small, "ShareGPT", 1.8, band(1.62, 1.98)),
        (large, "arXiv", "1.7 to 2.4", band(1.7, 2.4)),
        (large, "ShareGPT", "1.7 to 2.4", band(1.7, 2.4)),
    )
    return [
        judge("Prefetch serves at least what packing does, everywhere (least gain)", "≥ 1", at_least(0.98),
              runs.least_gain, "2% is the precision of a search."),
        *(
            judge(f"Gain in QPS, {name[10:].upper()} {data}", paper, rule,
                  partial(runs.gain, model=name, data=data.lower()))
            for name, data, paper, rule in gains
        ),
        judge("Packing-only QPS, 8B arXiv", 1.95, band(1.75, 2.15), lambda mode: runs.qps(packing[mode])),
        judge("HBM bandwidth that packing alone needs to serve as much, 8B arXiv", "2.4×", band(2.16, 2.64),
              runs.bandwidth),
    ]  # fmt: skip


def case4(options: RunOptions) -> ExperimentReport:
    """Reproduce case study 4 (Fig. 8)."""
    runs = CapacityStudy(options)
    runs.ensure([
        CapacityTask(m, MODELS[0], "arxiv", s, chunk, limit)
        for m in MODES for s in SCHEDULES
        for chunk, limit in ((512, "none"), (1024, "none"), (1024, "tight"))
    ] + [CapacityTask(m, MODELS[1], "arxiv", "prefetch", 1024, "none") for m in MODES])  # fmt: skip

    def saturated(mode: Mode, chunk: int) -> float:
        return runs.qps(CapacityTask(mode, MODELS[0], "arxiv", "prefetch", chunk, "none"))

    def gain(mode: Mode, chunk: int, limit: str = "none") -> float | None:
        return runs.gain(mode, MODELS[0], "arxiv", chunk=chunk, limit=limit)

    rows = [
        judge("Saturated gain, chunks of 1024, 8B arXiv", 1.53, band(1.38, 1.68), both(lambda m: gain(m, 1024))),
        judge("Saturated gain, chunks of 512, 8B arXiv", 1.39, band(1.25, 1.53), both(lambda m: gain(m, 512))),
        judge("Saturated gain grows with the chunk, 8B arXiv", "1.39 to 1.53",
              order("larger at 1024", lambda g: g["1024"] > g["512"]),
              both(lambda m: {str(c): gain(m, c) for c in (512, 1024)})),
        judge("Peak QPS with prefetch by chunk, 8B arXiv", "1024 higher",
              order("higher at 1024", lambda q: q["1024"] > q["512"]),
              both(lambda m: {str(c): saturated(m, c) for c in (512, 1024)})),
        judge("Gain within a P99 of 31 ms, chunks of 1024, 8B arXiv", "up to 3.0", band(2.7, 3.3),
              both(lambda m: gain(m, 1024, "tight"))),
        judge("Saturated QPS with prefetch, chunks of 1024: 8B over 70B", "8B higher",
              order("8B higher", lambda q: q["8B"] > q["70B"]),
              both(lambda m: {n[10:].upper(): runs.qps(CapacityTask(m, n, "arxiv", "prefetch", 1024, "none"))
                              for n in MODELS})),
    ]  # fmt: skip
    panels = [
        ReportChart(
            title=f"P99 gap over the rate, 8B arXiv, {mode} mode",
            x="requests a second",
            y="ms",
            lines={
                f"{chunk}, {schedule}": _gaps_by_rate(
                    runs, CapacityTask(mode, MODELS[0], "arxiv", schedule, chunk, "none")
                )
                for chunk in (512, 1024)
                for schedule in SCHEDULES
            },
        )
        for mode in MODES
    ]
    return _report(runs, rows, panels)


def sensitivity(options: RunOptions) -> ExperimentReport:
    """Show the gains of case studies 3 and 4 over what the paper leaves open."""
    runs = CapacityStudy(options, OPEN_REQUESTS)
    figures = list(OPEN)[:1] if options.quick else list(OPEN)
    grid = [(h, kv) for h in (HISTORY[::2] if options.quick else HISTORY) for kv in ADMISSION]

    def task(figure: str, history: float, kv: str) -> dict[str, Any]:
        chunk, limit, *_ = OPEN[figure]
        return {"chunk": chunk, "limit": limit, "kv_tokens": ADMISSION[kv], "history": history, "ratio": 1.05}

    runs.ensure([
        CapacityTask("paper", MODELS[0], "arxiv", s, **task(f, h, kv)) for f in figures for h, kv in grid
        for s in SCHEDULES
    ])  # fmt: skip
    gains = {f: {(h, kv): runs.gain("paper", MODELS[0], "arxiv", **task(f, h, kv)) for h, kv in grid} for f in figures}

    def row(figure: str) -> ClaimRow:
        _, _, paper, least = OPEN[figure]
        reached = order(f"{least:g} or more is reached", lambda found: bool(found) and max(found.values()) >= least)
        found = {f"history ×{h:g}, KV {kv}": gain for (h, kv), gain in gains[figure].items() if gain is not None}
        return judge(f"8B arXiv, {figure}: gain over what is not said", paper, reached, only("paper", found))

    lines = {
        f"{figure}, KV {kv}": [(h, gain or 0.0) for (h, at), gain in gains[figure].items() if at == kv]
        for figure in figures
        for kv in ADMISSION
    }
    panel = ReportChart(title="Gain of prefetching, 8B arXiv", x="cost of history", y="times", lines=lines)
    origin = source(
        "the accelerator's timeline, the cost of a chunk's history multiplied",
        f"Llama-3.1-8B, arXiv, {runs.count} requests, Poisson, Sarathi's policy; P99 of delays in 1 s",
        runs.seeds,
    )
    return ExperimentReport(source=origin, rows=tuple(map(row, figures)), panels=(panel,))


def _report(runs: CapacityStudy, rows: Sequence[Any], panels: Sequence[ReportChart]) -> ExperimentReport:
    origin = source(
        "the accelerator's timeline as the scheduler's latency model",
        f"{runs.count:,} requests, Poisson, Sarathi's policy; P99 of gaps in the limit, of delays in 1 s",
        runs.seeds,
        modes="paper: preset `paper`, KV for 128K tokens; default: the real model, the KV that HBM holds",
    )
    return ExperimentReport(source=origin, rows=tuple(rows), panels=tuple(panels))
