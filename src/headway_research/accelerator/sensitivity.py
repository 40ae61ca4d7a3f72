"""Case studies 3 and 4 over what the packing-prefetch paper leaves open: which gains are reachable at all.

Three things are not said. What a chunk pays for its history: 1 as computed, 2 as if each chunk attended to the whole
prompt, 2.5 where the gain for arXiv comes out. How KV is admitted: 128K tokens in all ("configured to hold the KV-cache
for one batch of 128K tokens"), or without a limit, as "the total KV-cache size can range from 10K to 128K tokens" may
mean. Which gaps count towards the P99: all of them, or none (`saturated`, where delays alone limit). Llama-3.1-8B on
arXiv in paper mode; 250 requests and a precision of 5%, coarser than the case studies.
"""

from __future__ import annotations

from dataclasses import replace

from headway.perf.latency.base import Seconds
from headway.sim.report.page import ReportChart
from headway.sim.workload import TraceRequest
from headway_research.accelerator.service_figures import KV_TOKENS, MODELS, TIGHT_S, requests
from headway_research.accelerator.serving import (
    AcceleratorLatency,
    ServiceLimits,
    at_rate,
    capacity,
    instance,
    sarathi,
)
from headway_research.accelerator.stage import Mode as Schedule
from headway_research.accelerator.stage_figures import setting, slo_s
from headway_research.base import ExperimentReport, RunOptions, SimulationCache, source
from headway_research.verdicts import VerdictRule, judge, only, order

HISTORY = (1.0, 2.0, 2.5)
ADMISSION = {"128K": KV_TOKENS, "any": 1 << 24}
FIGURES: dict[str, tuple[int, str, float, float]] = {
    "case 3, chunks of 512 within the SLO": (512, "slo", 2.4, 2.16),
    "case 4, chunks of 1024 within 31 ms": (1024, "tight", 3.0, 2.7),
    "case 4, chunks of 1024 saturated": (1024, "none", 1.53, 1.38),
}
"""(chunk, limit of gaps, the paper's gain, the least that counts as it) by figure."""
REQUESTS = 250


class HistoryCost(AcceleratorLatency):
    """An accelerator on which a chunk's history costs a multiple of what it does."""

    times = 1.0

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        """See AcceleratorLatency."""
        return super().chunk_s(round(past * self.times), first, last)


Task = tuple[str, float, str, Schedule, int]
"""(figure, cost of history, admission, schedule, requests)."""
RESULTS: SimulationCache[Task, float] = SimulationCache()


def solve(task: Task) -> float:
    """Return the capacity of one combination in requests a second."""
    figure, times, admission, schedule, count = task
    chunk, limit, _, _ = FIGURES[figure]
    at = setting("paper", MODELS[0])
    latency = HistoryCost(at, schedule)
    latency.times = times
    spec = replace(instance(at, schedule, sarathi(chunk), ADMISSION[admission]), latency=latency)
    limit_s = {"slo": slo_s("paper", MODELS[0]), "tight": TIGHT_S, "none": None}[limit]
    drawn = requests("arxiv", count, 0)

    def draw(qps: float) -> list[TraceRequest]:
        return at_rate(drawn, qps)

    return capacity(spec, draw, ServiceLimits(tbt_s=limit_s), ratio=1.05).qps


def _reached(least: float) -> VerdictRule:
    return order(f"{least:g} or more is reached", lambda found: bool(found) and max(found.values()) >= least)


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""
    count = 24 if options.quick else REQUESTS
    figures = list(FIGURES)[:1] if options.quick else list(FIGURES)
    history = HISTORY[::2] if options.quick else HISTORY
    schedules: tuple[Schedule, Schedule] = ("packing", "prefetch")
    tasks = [(f, h, a, s, count) for f in figures for h in history for a in ADMISSION for s in schedules]
    RESULTS.ensure(tasks, solve, options.jobs, options.on_progress)

    def gains(figure: str) -> dict[str, float]:
        found = {}
        for times in history:
            for admission in ADMISSION:
                packing, prefetch = (RESULTS[figure, times, admission, schedule, count] for schedule in schedules)
                if packing:
                    found[f"history ×{times:g}, KV {admission}"] = prefetch / packing
        return found

    rows = tuple(
        judge(
            f"8B arXiv, {figure}: gain over what is not said",
            FIGURES[figure][2],
            _reached(FIGURES[figure][3]),
            only("paper", gains(figure)),
        )
        for figure in figures
    )
    lines = {
        f"{figure}, KV {admission}": [
            (times, gains(figure).get(f"history ×{times:g}, KV {admission}", 0.0)) for times in history
        ]
        for figure in figures
        for admission in ADMISSION
    }
    panel = ReportChart(title="Gain of prefetching, 8B arXiv", x="cost of history", y="times", lines=lines)
    origin = source(
        "the accelerator's timeline, the cost of a chunk's history multiplied",
        f"Llama-3.1-8B, arXiv, {count} requests, Poisson, Sarathi's policy; P99 of delays in 1 s",
        [0],
    )
    return ExperimentReport(source=origin, rows=rows, panels=(panel,))
