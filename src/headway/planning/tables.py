"""Terminal output of `headway plan`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from headway.planning.answer import binds, latency_note
from headway.planning.candidates import cost_of
from headway.planning.search import PlanResult, pareto
from headway.planning.simulate import CandidateMeasure
from headway.sim.report.units import duration

_ROWS = 12
"""Longest Pareto table, in rows."""


def plan_report(result: PlanResult) -> RenderableType:
    """Return the answer: the plan and its margins (or the nearest miss), the Pareto front, and what was tried."""
    return Group(_headline(result), *_tables(result), _tried(result))


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


def _tables(result: PlanResult) -> list[Table]:
    one, demands = result.best or result.nearest, result.question.demand_list()
    if one is None:
        return []
    margins = Table()
    for name in ("demand", "limit", "predicted", "of the limit"):
        margins.add_column(name, justify="left" if name == "demand" else "right")
    for index, demand in enumerate(demands):
        worst = one.worst_s(index)
        margins.add_row(demand.name, duration(demand.limit_s), _spread(one, index), f"{worst / demand.limit_s:.0%}")
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


def _tried(result: PlanResult) -> str:
    simulated = len(result.measures)
    stopped = sum(not one.complete() for one in result.measures)
    layouts = f"{len(result.without_memory)} layouts without memory"
    counts = f"{result.bounded} removed by the closed-form bound, {simulated} simulated ({stopped} stopped early)"
    words = [f"{result.candidates} candidates, {result.requests:,} requests: {layouts}, {counts}"]
    if result.screened:
        words.append(f"{result.screened} removed on a part of the workload: raise search.effort for an exact search")
    words.append(f"iteration times: {latency_note(result.question, result.best or result.nearest)}")
    return "\n".join(words)
