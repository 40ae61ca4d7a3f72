"""PecSched §6.5 and §6.6: time of decisions over JCT (Table 7), and as the cluster grows to 8,192 GPUs (Fig. 15).

Decisions are timed on the computer at hand while `drill` drives the policy at any size. The `literal` policy
scans every replica for each decision, as the paper's scheduler does; the indexed one is the default. Both decide alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from statistics import fmean
from typing import NamedTuple

import numpy as np

from headway.core.request import Request
from headway.perf.hardware import model
from headway.perf.latency.groups import GroupLatency
from headway.policy.placement.contract import ClusterInstance, ClusterState
from headway.policy.placement.pecsched import PecSched, PecSchedOptions
from headway.policy.placement.registry import PolicyContext
from headway.sim.cluster.build import cluster_of
from headway.sim.cluster.state import ClusterSpec
from headway.sim.report.page import ReportChart
from headway.sim.scenario import parse_scenario
from headway.sim.workload import TraceRequest
from headway.sim.workload.generate import ConstantArrivals, preset
from headway_research.base import MODES, ClaimRow, ExperimentReport, Mode, RunOptions, source
from headway_research.pecsched.drill import DrillResult, PlacementDrill
from headway_research.pecsched.literal import LiteralPecSched
from headway_research.pecsched.setting import MODELS, scenario, work_s
from headway_research.verdicts import at_least, at_most, judge, order

SIZES = (32, 128, 512, 2048, 8192)
# load of short requests, and share of the replicas taken by long ones at the start
SHORT_LOAD, HELD_AT_FIRST = 0.6, 0.6
SHORTS = 20_000
# the scan is slow at 8,192 GPUs: fewer short requests give its percentiles
LITERAL_SHORTS = 1_500
# seconds of every decode: only its end matters to placement
DECODE_S = 2.0


class DecisionCost(NamedTuple):
    """Times of decisions at one cluster size."""

    short_s: float
    """99th percentile of placing a short request, seconds."""
    long_s: float
    """99th percentile of placing a long request, seconds."""
    short_ratio: float
    """`short_s` over the mean JCT of short requests."""
    long_ratio: float
    """`long_s` over the mean JCT of long requests."""
    per_s: float
    """Short decisions a second, by their mean time."""


DecisionCosts = dict[tuple[str, int, bool], DecisionCost]
"""By (model, GPUs, whether decisions scan all replicas)."""


@cache
def _spec(name: str) -> ClusterSpec:
    data = scenario(name, "PecSched", "default", "0.8", 1.0)
    return cluster_of(parse_scenario(data), [TraceRequest(0.0, 1, 1)])


def drill(
    name: str, gpus: int, count: int, literal: bool, stopwatch: Callable[[], float]
) -> tuple[DrillResult, list[Request]]:
    """Run PecSched on `gpus` GPUs: long requests occupy a share of the replicas at the start, short ones follow."""
    at, spec = MODELS[name], _spec(name)
    replicas, each = gpus // at.tp, 8 // at.tp
    prefill = [ClusterInstance(id=i, node=i // each, role="prefill", tp=at.tp) for i in range(replicas)]
    decode = [ClusterInstance(id=replicas + i, node=replicas // each + i, role="decode", tp=at.tp) for i in range(4)]
    rng = random.Random(0)
    size = min(at.long_sp, replicas)
    work = [
        Request(id=f"l{i}", arrival_s=0.0, prompt_tokens=rng.randint(100_000, 500_000), max_output_tokens=100)
        for i in range(max(1, round(HELD_AT_FIRST * replicas / size)))
    ]
    drawn = preset("pecsched-short").draw(np.random.default_rng(0), ConstantArrivals(1.0), count)
    # the rate at which short requests are SHORT_LOAD of what all replicas can compute
    gap_s, now = work_s(name, MODELS[name].long_sp)[0] / (SHORT_LOAD * replicas), 0.001
    for i, short in enumerate(drawn):
        now += rng.expovariate(1 / gap_s)
        work.append(Request(id=f"s{i}", arrival_s=now, prompt_tokens=short.prompt_tokens, max_output_tokens=100))
    options = PecSchedOptions(long_replicas="fixed", long_sp=size)
    spans: GroupLatency = spec.spans
    kind = LiteralPecSched if literal else PecSched
    policy = kind(PolicyContext(latency=spans, shape=model(at.model)), options)
    run = PlacementDrill(
        policy, ClusterState([*prefill, *decode], spec.links), spans, spec.shape.layers, DECODE_S, stopwatch
    )
    return run.run(work, float("inf") if count <= 200 else now), work


def cost(name: str, gpus: int, count: int, literal: bool, stopwatch: Callable[[], float]) -> DecisionCost:
    """Run a drill and return the times of its decisions."""
    out, work = drill(name, gpus, count, literal, stopwatch)
    jct: dict[str, list[float]] = {"s": [], "l": []}
    for request in work:
        if request.id in out.prefilled_s:
            jct[request.id[0]].append(out.prefilled_s[request.id] - request.arrival_s + DECODE_S)
    short_s, long_s = (float(np.quantile(found, 0.99)) for found in (out.short_s, out.long_s))
    alone_s = work_s(name, MODELS[name].long_sp)[1] / min(MODELS[name].long_sp, gpus // MODELS[name].tp) + DECODE_S
    # in a short drill perhaps no long request ends: take its JCT on an idle cluster, a lower bound
    long_jct_s = fmean(jct["l"]) if jct["l"] else alone_s
    return DecisionCost(short_s, long_s, short_s / fmean(jct["s"]), long_s / long_jct_s, 1 / fmean(out.short_s))


def table7(options: RunOptions) -> ExperimentReport:
    """Reproduce Table 7: 99th percentile of decision time over mean JCT, on 32 GPUs."""
    found = _costs(options, (32,), list(MODELS))
    paper = {
        "short": {"Mistral-v0.3 7B": 0.00354, "Phi-3 14B": 0.00282, "Yi 34B": 0.00196, "Llama-3.1 70B": 0.00071},
        "long": {"Mistral-v0.3 7B": 0.00183, "Phi-3 14B": 0.00147, "Yi 34B": 0.00055, "Llama-3.1 70B": 0.00019},
    }
    rows = tuple(
        judge(
            f"Scheduling time over JCT of {kind} requests, P99",
            paper[kind],
            order("at most the paper's for every model", partial(_below, paper[kind])),
            {mode: _by_model(found, 32, mode == "paper", f"{kind}_ratio") for mode in MODES},
            "paper mode: the scan. Time to pause a prefill is not counted: it is part of the simulated queueing.",
        )
        for kind in ("short", "long")
    )
    return ExperimentReport(source=_source(), rows=rows)


def _below(paper: dict[str, float], got: dict[str, float]) -> bool:
    return bool(got) and all(got[name] <= paper[name] for name in got)


def fig15(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 15: scheduling time up to 8,192 GPUs."""
    sizes = (32, 512) if options.quick else SIZES
    found = _costs(options, sizes, list(MODELS))
    panels = tuple(
        ReportChart(
            title=f"P99 of a short decision over JCT, {'scan' if literal else 'indexed'}",
            x="GPUs",
            y="share of JCT",
            log_x=True,
            log_y=True,
            lines={
                name: [
                    (size, found[name, size, literal].short_ratio) for size in sizes if (name, size, literal) in found
                ]
                for name in MODELS
            },
        )
        for literal in (True, False)
    )
    return ExperimentReport(source=_source(), rows=_size_rows(found, sizes), panels=panels)


def _size_rows(found: DecisionCosts, sizes: tuple[int, ...]) -> tuple[ClaimRow, ...]:
    top = sizes[-1]

    def growth(literal: bool) -> dict[str, float]:
        # growth over the last factor of 16 of the grid
        first = sizes[-3] if len(sizes) > 3 else 32
        small, large = (_by_model(found, size, literal, "short_s") for size in (first, top))
        return {name: large[name] / small[name] for name in large if name in small}

    def at_top(field: str) -> dict[Mode, dict[str, float]]:
        return {mode: _by_model(found, top, mode == "paper", field) for mode in MODES}

    return (
        judge(
            f"Scheduling time over JCT of short requests at {top:,} GPUs, P99",
            "at most 5.2%; 1.1% for Llama-3.1 70B",
            order("at most 5.2% for every model", lambda got: bool(got) and max(got.values()) <= 0.052),
            at_top("short_ratio"),
            "paper mode: the scan.",
        ),
        judge(
            "Growth of a short decision's P99, from 512 to 8,192 GPUs",
            "about linear",
            order("at least 4 for every model", lambda got: bool(got) and min(got.values()) >= 4),
            {"paper": growth(True), "default": growth(False)},
            "The scan grows with the cluster; the indexed decision does not.",
        ),
        judge(
            f"Short decisions a second at {top:,} GPUs, Mistral-v0.3 7B",
            None,
            at_least(100_000),
            {mode: by_model.get("Mistral-v0.3 7B") for mode, by_model in at_top("per_s").items()},
            "What does not show in a share of JCT: a scan is slower than requests come, about 42,000 a second.",
        ),
        judge(
            "Growth of an indexed short decision's P99, from 512 to 8,192 GPUs, the largest of the models",
            None,
            at_most(2.0),
            {"paper": None, "default": max(growth(False).values(), default=None)},
        ),
    )


def _costs(options: RunOptions, sizes: tuple[int, ...], names: list[str]) -> DecisionCosts:
    if options.stopwatch is None:
        return {}
    shorts, scanned = (2000, 300) if options.quick else (SHORTS, LITERAL_SHORTS)
    return {
        (name, size, literal): cost(
            name, size, scanned if literal else max(shorts, 4 * size), literal, options.stopwatch
        )
        for name in names
        for size in sizes
        for literal in (True, False)
    }


def _by_model(found: DecisionCosts, size: int, literal: bool, field: str) -> dict[str, float]:
    return {name: getattr(cost, field) for (name, at, kind), cost in found.items() if at == size and kind == literal}


def _source() -> dict[str, object]:
    return source(
        "decisions: timed on this machine; requests: fitted A100 profiles and fast-SP formulas",
        f"replicas of 8-GPU nodes; {HELD_AT_FIRST:.0%} of them taken by long requests at the start, short requests at "
        f"{SHORT_LOAD:g} of what all compute",
        [0],
        0.0,
    )
