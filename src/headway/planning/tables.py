"""Terminal output of `headway plan`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from headway.planning.answer import binds, latency_note
from headway.planning.candidates import cost_of
from headway.planning.error_bars import PlanErrorBars
from headway.planning.search import PlanResult, pareto
from headway.planning.simulate import CandidateMeasure
from headway.sim.report.tables import duration

_ROWS = 12
"""Longest Pareto table, in rows."""


def plan_report(result: PlanResult, bars: PlanErrorBars | None = None) -> RenderableType:
    """Return the answer: the plan and its margins (or the nearest miss), the Pareto front, and what was tried."""
    return Group(_headline(result), *_tables(result, bars), _tried(result, bars))


def _headline(result: PlanResult) -> str:
    one, question = result.best or result.nearest, result.question
    if one is None:
        faults = "; ".join(result.without_memory.values())
        return f"No plan: no layout fits in memory. {faults}"
    what = f"{one.candidate.name} on {one.candidate.accelerators} × {one.candidate.accelerator}"
    if result.best is not None:
        return f"Cheapest plan: {what} (cost {cost_of(one.candidate, question):g}). Binds: {binds(one, question)}"
    return (
        f"No plan meets all demands. The nearest is {what}: what it reaches is what can be asked for.\n"
        f"Binds: {binds(one, question)}"
    )


def _tables(result: PlanResult, bars: PlanErrorBars | None) -> list[Table]:
    one, demands = result.best or result.nearest, result.question.demand_list()
    if one is None:
        return []
    margins = Table()
    for name in ("demand", "limit", "predicted", "of the limit", *(["error bar"] if bars is not None else [])):
        margins.add_column(name, justify="left" if name == "demand" else "right")
    for index, demand in enumerate(demands):
        worst = one.worst_s(index)
        cells = [demand.name, duration(demand.limit_s), _spread(one, index), f"{worst / demand.limit_s:.0%}"]
        if bars is not None:
            cells.append(" … ".join(map(duration, bars.range_s(index))))
        margins.add_row(*cells)
    front = Table(title="Pareto front of what was simulated to the end", title_justify="left")
    front.add_column("plan")
    for name in ("cost", *(demand.name for demand in demands), "good/s", "idle"):
        front.add_column(name, justify="right")
    rows = pareto(result.measures, result.question)
    for row in rows[:_ROWS]:
        met = "✓ " if row.meets(demands) else "  "
        seed = row.seeds[0]
        values = [duration(row.worst_s(i)) for i in range(len(demands))]
        cost = f"{cost_of(row.candidate, result.question):g}"
        front.add_row(met + row.candidate.name, cost, *values, f"{seed.goodput_rps:.2f}", f"{seed.idle_share:.0%}")
    return [margins, front] if len(rows) > 1 else [margins]


def _spread(one: CandidateMeasure, index: int) -> str:
    """Return the worst seed's value, and the best one's where there are several."""
    values = [seed.values_s[index] for seed in one.seeds]
    return duration(max(values)) if len(values) == 1 else f"{duration(min(values))} … {duration(max(values))}"


def _tried(result: PlanResult, bars: PlanErrorBars | None) -> str:
    simulated = len(result.measures)
    stopped = sum(not one.complete() for one in result.measures)
    layouts = f"{len(result.without_memory)} layouts without memory"
    counts = f"{result.bounded} removed by closed-form bounds, {simulated} simulated ({stopped} stopped early)"
    words = [f"{result.candidates} candidates, {result.requests:,} requests: {layouts}, {counts}"]
    if result.missed_at_peak:
        words.append(
            f"{result.missed_at_peak} more miss a demand by the busiest part of the workload alone: "
            "search.busiest_part=1 simulates them on all of it"
        )
    if result.screened:
        words.append(f"{result.screened} removed on a part of the workload: raise search.effort for an exact search")
    words.append(f"iteration times: {latency_note(result.question, result.best or result.nearest)}")
    if bars is not None:
        words.append(f"error bars: simulated again with all iterations {bars.band.words()} of what is predicted")
    return "\n".join(words)
