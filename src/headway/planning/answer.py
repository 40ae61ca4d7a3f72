"""What to do with a plan: its JSON, the scenario that simulates it again, the commands that start it, and tables for
the terminal.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from headway.core.errors import ConfigError
from headway.core.files import read_input, write_output
from headway.perf.hardware import accelerator
from headway.perf.latency import table
from headway.planning.question import DeploymentCandidate, PlanQuestion, cost_of, cost_unit
from headway.planning.search import PlanErrorBars, PlanResult, pareto
from headway.planning.simulate import CandidateMeasure, MeasureKey, SeedMeasure, SimulationJob
from headway.sim.report.page import ReportChart
from headway.sim.report.tables import duration

SCHEMA = "headway.plan/1"


def result_json(result: PlanResult, bars: PlanErrorBars | None = None) -> dict[str, Any]:
    """Return everything as plain data. bars: of the plan, or of the nearest one."""
    question = result.question
    return {
        "schema": SCHEMA,
        "question": question.model_dump(mode="json", by_alias=True),
        "latency": latency_note(question, result.best or result.nearest),
        "cost_unit": cost_unit(question),
        "requests": result.requests,
        "candidates": result.candidates,
        "without_memory": [
            {"accelerator": name, "layout": layout, "why": why} for (name, layout), why in result.without_memory.items()
        ],
        "bounded": result.bounded,
        "missed_at_peak": result.missed_at_peak,
        "simulated": len(result.measures),
        "best": measure_json(result.best, question),
        "nearest": measure_json(result.nearest, question),
        "front": [measure_json(one, question) for one in pareto(result.measures, question)],
        "error_bars": None if bars is None else _bars_json(bars, question),
    }


def _bars_json(bars: PlanErrorBars, question: PlanQuestion) -> dict[str, Any]:
    ranges = [bars.range_s(index) for index in range(len(question.demand_list()))]
    return {
        "iteration_times": bars.band.words(),
        "share": bars.band.share,
        "extrapolated": bars.band.extrapolated,
        "derived": bars.band.derived,
        "meets": bars.meets,
        "demands": [
            {"demand": demand.name, "least_s": least, "greatest_s": greatest}
            for demand, (least, greatest) in zip(question.demand_list(), ranges, strict=True)
        ],
    }


def measure_json(one: CandidateMeasure | None, question: PlanQuestion) -> dict[str, Any] | None:
    """Return one candidate with its demanded latencies, the worst seed's and each seed's."""
    if one is None:
        return None
    demands = question.demand_list()
    return {
        "plan": one.candidate.name,
        **asdict(one.candidate),
        "accelerators": one.candidate.accelerators,
        "cost": cost_of(one.candidate, question),
        "demands": [
            {
                "demand": demand.name,
                "limit_s": demand.limit_s,
                "worst_s": one.worst_s(i),
                "seeds_s": [s.values_s[i] for s in one.seeds],
            }
            for i, demand in enumerate(demands)
        ]
        if one.complete()
        else [],
        "binds": binds(one, question),
        "use": [{k: v for k, v in s._asdict().items() if k not in ("values_s", "least_s")} for s in one.seeds],
    }


def binds(one: CandidateMeasure, question: PlanQuestion) -> str:
    """Return what the tightest demand is made of, in words; the use that supports it is in the JSON beside it."""
    if not one.keeps_up():
        return f"{next(seed.missed for seed in one.seeds if seed.missed)}" if one.seeds else one.why
    demands = question.demand_list()
    index = max(range(len(demands)), key=lambda i: one.worst_s(i) / demands[i].limit_s)
    seed = max(one.seeds, key=lambda s: s.values_s[index])
    if seed.preemptions or seed.kv_peak_share > 0.95:
        return f"KV memory ({seed.kv_peak_share:.0%} of it in use, {seed.preemptions} preemptions)"
    if demands[index].metric in ("tbt", "max_tbt", "tpot"):
        return f"length of iterations (tightest: {demands[index].name})"
    if demands[index].metric == "ttft" and seed.queueing_share > 0.5:
        return f"queueing ({seed.queueing_share:.0%} of TTFT; instances idle {seed.idle_share:.0%})"
    return f"prefill compute (queueing is {seed.queueing_share:.0%} of TTFT; instances idle {seed.idle_share:.0%})"


def latency_note(question: PlanQuestion, one: CandidateMeasure | None) -> str:
    """Return where iteration times come from, and how far to trust them."""
    if question.latency.source == "table":
        serving = table.load(Path(str(question.latency.file)), None).serving
        more = f"and served: {serving.words()}" if serving else "without what a server adds (`headway profile` does)"
        return f"measured on its machine ({question.latency.file}), {more}"
    if question.latency.source == "roofline":
        return "roofline of the data sheet: not measured"
    name = one.candidate.accelerator if one is not None else question.accelerators[0].name
    device = accelerator(name)
    from headway.perf.latency.fitted import shipped

    if device.kernels in shipped():
        return f"fitted to public operator profiles of {device.kernels} (headway.perf.latency.data)"
    return f"derived: {device.name} has no profile, so the nearest profiled die is scaled by data sheets"


def serve_commands(candidate: DeploymentCandidate, question: PlanQuestion) -> str:
    """Return a shell script that starts the plan's instances in vLLM with Headway's scheduler, or says why it cannot.

    The checkpoint is left as a variable: the question names a shape, not a folder."""
    head = [
        "#!/bin/sh",
        f"# {candidate.name} on {candidate.accelerators} x {candidate.accelerator}, planned by `headway plan`.",
        "# Each line is one instance, behind a load balancer that takes the one with the fewest requests.",
        "MODEL=${MODEL:?the folder or hub name of the checkpoint}",
    ]
    if candidate.kvp > 1:
        return "\n".join([*head, "# KV groups (kvp) are Headway's own engine's: headway serve --kv-parallel-size", ""])
    settings = {"headway": {"policy": candidate.policy, "t_target_ms": round(candidate.t_target_s * 1000, 3)}}
    words = ["--tensor-parallel-size", str(candidate.tp)]
    if candidate.stages > 1:
        words += ["--pipeline-parallel-size", str(candidate.stages)]
    words += ["--scheduler-cls", "headway.vllm.Scheduler", "--additional-config", json.dumps(settings)]
    transfer = (
        ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})]
        if candidate.decoders
        else []
    )
    each = candidate.tp * candidate.stages
    lines = []
    for index in range(candidate.replicas + candidate.decoders):
        devices = ",".join(str(index * each + i) for i in range(each))
        command = shlex.join(["--port", str(8000 + index), *words, *transfer])
        kind = "" if not candidate.decoders else "  # prefills" if index < candidate.replicas else "  # decodes"
        lines.append(f'CUDA_VISIBLE_DEVICES={devices} vllm serve "$MODEL" {command} &{kind}')
    return "\n".join([*head, *lines, "wait", ""])


def cluster_data(candidate: DeploymentCandidate) -> dict[str, Any]:
    """Return the file with which `headway cluster` starts the plan. Without a `model` it starts the embedded one."""
    serve: dict[str, Any] = {
        "scheduling-policy": candidate.policy,
        "tensor-parallel-size": candidate.tp,
        "pipeline-parallel-size": candidate.stages,
        "kv-parallel-size": candidate.kvp,
    }
    if candidate.decoders:
        pools = [{"role": "prefill", "count": candidate.replicas}, {"role": "decode", "count": candidate.decoders}]
        return {"placement": "fixed-sp", "options": {"sp": 1}, "pools": pools, "serve": serve}
    serve["t-target-ms"] = round(candidate.t_target_s * 1000, 3)
    return {"placement": "jsq", "pools": [{"count": candidate.replicas}], "serve": serve}


def write_files(result: PlanResult, folder: Path, bars: PlanErrorBars | None = None) -> list[Path]:
    """Write plan.json and, with a plan, scenario.yaml, serve.sh and cluster.yaml to a folder; return their paths.

    Raises ConfigError if it cannot."""
    import msgspec
    import yaml

    plan = msgspec.json.format(msgspec.json.encode(result_json(result, bars)), indent=1)
    bodies = {"plan.json": plan.decode() + "\n"}
    if result.best is not None:
        candidate = result.best.candidate
        bodies["scenario.yaml"] = yaml.safe_dump(candidate.scenario_data(result.question), sort_keys=False)
        bodies["serve.sh"] = serve_commands(candidate, result.question)
        head = "# headway cluster cluster.yaml. `model`: the checkpoint's folder; without it the embedded one.\n"
        bodies["cluster.yaml"] = head + yaml.safe_dump(cluster_data(candidate), sort_keys=False)
    for name, body in bodies.items():
        write_output(folder / name, body.encode())
    return [folder / name for name in bodies]


# -- results of simulations, kept to go on with a search that was broken off -------------------------------------------


def measure_line(job: SimulationJob, one: CandidateMeasure) -> str:
    """Return one line of a file of results."""
    seeds = [seed._asdict() for seed in one.seeds]
    return json.dumps(
        {"candidate": asdict(one.candidate), "requests": job.requests, "to_the_end": job.to_the_end, "ratio": job.ratio,
         "bias": job.bias, "seeds": seeds, "why": one.why}
    )  # fmt: skip


def read_measures(path: Path, question: PlanQuestion) -> dict[MeasureKey, CandidateMeasure]:
    """Return the results in a file that `--resume` wrote: its first line is the question. A last line that was cut off
    is left out. Raises ConfigError for results of another question, and for another file."""
    try:
        lines = read_input(path, 1 << 30).decode().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    known: dict[MeasureKey, CandidateMeasure] = {}
    for number, line in enumerate(lines):
        try:
            data: Mapping[str, Any] = json.loads(line)
        except (ValueError, RecursionError):
            if 0 < number == len(lines) - 1:
                break
            raise ConfigError(f"{path}, line {number + 1} is not JSON: not a file of `headway plan --resume`") from None
        if number == 0:
            if data != question_line(question):
                raise ConfigError(f"{path} holds results of another question: name another file, or delete it")
            continue
        one = CandidateMeasure(
            DeploymentCandidate(**data["candidate"]), tuple(_seed(seed) for seed in data["seeds"]), data["why"]
        )
        known[one.candidate, data["requests"], data["to_the_end"], data["ratio"], data["bias"]] = one
    return known


def question_line(question: PlanQuestion) -> dict[str, Any]:
    """Return what a file of results begins with."""
    plain: dict[str, Any] = json.loads(question.model_dump_json(by_alias=True))
    return {"schema": f"{SCHEMA} measures/3", "question": plain}


def _seed(data: Mapping[str, Any]) -> SeedMeasure:
    return SeedMeasure(**{**data, "values_s": tuple(data["values_s"]), "least_s": tuple(data["least_s"])})


_ROWS = 12
"""Longest Pareto table, in rows."""


def plan_report(result: PlanResult, bars: PlanErrorBars | None = None) -> RenderableType:
    """Return the answer: the plan and its margins (or the nearest miss), the Pareto front, and what was tried."""
    return Group(_headline(result, bars), *_tables(result, bars), _tried(result, bars))


def _headline(result: PlanResult, bars: PlanErrorBars | None) -> str:
    one, question = result.best or result.nearest, result.question
    if one is None:
        faults = "; ".join(result.without_memory.values())
        return f"No plan: no layout fits in memory. {faults}"
    what = f"{one.candidate.name} on {one.candidate.accelerators} × {one.candidate.accelerator}"
    if result.best is not None:
        cost = f"cost in {cost_unit(question)}: {cost_of(one.candidate, question):g}"
        head = f"Cheapest plan: {what} ({cost}). Binds: {binds(one, question)}"
        crossed = [
            f"{demand.name} up to {_latency(bars.range_s(index)[1])} of {duration(demand.limit_s)}"
            for index, demand in enumerate(question.demand_list() if bars is not None else ())
            if bars is not None and bars.range_s(index)[1] > demand.limit_s
        ]
        if bars is None or bars.meets == 1:
            return head
        return f"{head}\n{_draws(bars)}" + (f" It may miss: {', '.join(crossed)}" if crossed else "")
    if not one.keeps_up() and one.seeds:
        return f"No plan keeps up. The nearest is {what}: it keeps up with {one.kept_up():.0%} of what arrives."
    head = f"No plan meets all demands. The nearest is {what}: what it reaches is what can be asked for."
    if bars is not None and bars.meets > 0:
        head += f"\n{_draws(bars)}"
    return f"{head}\nBinds: {binds(one, question)}"


def _draws(bars: PlanErrorBars) -> str:
    return f"Meets all limits in {bars.meets:.0%} of draws of how far iteration times may be off."


def _tables(result: PlanResult, bars: PlanErrorBars | None) -> list[Table]:
    one, demands = result.best or result.nearest, result.question.demand_list()
    if one is None or not one.complete():
        return []
    margins = _table()
    for name in ("demand", "limit", "predicted", "of the limit", *(["error bar"] if bars is not None else [])):
        margins.add_column(name, justify="left" if name == "demand" else "right")
    for index, demand in enumerate(demands):
        worst = one.worst_s(index)
        cells = [demand.name, duration(demand.limit_s), _spread(one, index), f"{worst / demand.limit_s:.0%}"]
        if bars is not None:
            cells.append(" … ".join(map(_latency, bars.range_s(index))))
        margins.add_row(*cells)
    front = _table("Pareto front of what was simulated to the end")
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


def candidates_table(result: PlanResult) -> Table:
    """Return every simulated candidate with its largest latency as a share of its limit, or why it was stopped."""
    demands = result.question.demand_list()
    names = {demand.name for demand in demands}
    table = _table("What was simulated")
    for name in ("candidate", "accelerators", "cost", "of its limit", "outcome"):
        table.add_column(name, justify="right" if name in ("cost", "of its limit") else "left")
    for one in sorted(result.measures, key=lambda one: (cost_of(one.candidate, result.question), one.rank(demands))):
        missed = next((seed.missed for seed in one.seeds if seed.missed), one.why)
        missed = f"misses {missed}" if missed in names else missed
        outcome = "meets all limits" if one.meets(demands) else missed or "misses a limit"
        share = f"{one.ratio(demands):.0%}" if math.isfinite(one.ratio(demands)) else "-"
        where = f"{one.candidate.accelerators} × {one.candidate.accelerator}"
        cost = f"{cost_of(one.candidate, result.question):g}"
        table.add_row(one.candidate.name, where, cost, share, outcome if one.complete() else f"stopped: {outcome}")
    return table


def candidates_chart(result: PlanResult) -> ReportChart:
    """Return the largest latency, as a share of its limit, over cost, of the candidates that ran to the end."""
    demands = result.question.demand_list()
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in result.measures:
        if one.complete():
            name = "meets all limits" if one.meets(demands) else "does not"
            lines.setdefault(name, []).append((cost_of(one.candidate, result.question), one.ratio(demands)))
    title, x = "Largest latency as a share of its limit (1: at the limit)", f"cost, {cost_unit(result.question)}"
    return ReportChart(title=title, x=x, lines=lines, dots=True, log_y=True)


def _table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _latency(seconds: float) -> str:
    return duration(seconds) if seconds < math.inf else "∞"


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
    words.append(f"iteration times: {latency_note(result.question, result.best or result.nearest)}")
    if bars is not None:
        behind = "" if bars.slow.complete() else "; ∞: it no longer keeps up"
        words.append(
            f"error bars: simulated again with all iterations {bars.band.words()} of what is predicted{behind}"
        )
    return "\n".join(words)
