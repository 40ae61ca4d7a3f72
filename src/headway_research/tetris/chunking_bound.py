"""Tetris Fig. 13: how much chunks can gain at all, by Eq. (1) and Table 1 alone.

The paper has single-chunk plans up to 4.17 times slower (§7.3). Two bounds on that, Llama-3 8B:

One request. Groups are nested (Algorithm 1: each chunk's group contains the one before), so a request meets the times
at which 1, 2, 4, 8 and 16 of its instances are free. The gain of any chunking is the best single chunk's TTFT over that
of the best plan of up to three chunks, which fill the time until the next larger group is free. Its largest value over
all queues and all lengths of the workloads is a bound for every request, whatever the scheduler.

All requests. Gains add up in queues, so the whole is simulated: the ratio of median TTFT near the critical load, with
history free of cost (Table 1 has none, c = 2d is an assumption), with bursty arrivals, and with both. Improvement rate
0.5, 1,000 requests, first seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
from msgspec.structs import replace as replaced

from headway.perf.latency import eq1
from headway.perf.latency.eq1 import Eq1Coefficients, Eq1Latency
from headway.policy.placement.registry import make_placement
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.metrics import ttft_s
from headway.sim.report.page import ReportChart
from headway.sim.spec import RunSpec
from headway.sim.workload import TraceRequest
from headway.sim.workload.generate import arrivals, preset
from headway_research.base import ExperimentReport, RunOptions, source
from headway_research.tetris.setting import prefill_cluster
from headway_research.verdicts import at_most, every, judge_same

LENGTHS = tuple(int(4_000 * 1.25**k) for k in range(18))
"""Tokens, from the shortest prompt of the workloads to the longest, 190K."""
WAITS = 40
LEAST = 2.33
"""The smallest gain that Fig. 13 reports for the P50."""
HISTORY = {"c = 2d": 2.0, "c = d": 1.0, "c = 0": 0.0}
NEAR_CRITICAL = {"short": 6.0, "medium": 4.0, "long": 2.0}
BURSTY_CV = 3.0


def with_history(times: float) -> Eq1Latency:
    """Return Table 1's fit with c = times · d."""
    table = eq1.tetris_table1()
    return Eq1Latency(
        {sp: replaced(at, c=times * at.d) for sp, at in table.sizes.items()}, f"{table.source}, c changed"
    )


def _seconds(at: Eq1Coefficients, past: float, tokens: float) -> float:
    return at.a + at.b * tokens + at.c * past * tokens + at.d * tokens * tokens


def _tokens(at: Eq1Coefficients, past: float, seconds: float) -> float:
    """Return the tokens of a chunk over `past` that end within `seconds`; 0 where not even one does."""
    linear, left = at.b + at.c * past, seconds - at.a
    return 0.0 if left <= 0 else 2 * left / (linear + (linear * linear + 4 * at.d * left) ** 0.5)


def chunked_s(sizes: list[Eq1Coefficients], free_s: list[float], tokens: int) -> float:
    """Return the TTFT of a plan that computes on each size until the next is free, and the rest on the last."""
    past, now = 0.0, free_s[0]
    for at, next_s in zip(sizes[:-1], free_s[1:], strict=True):
        done = min(_tokens(at, past, next_s - now), tokens - past)
        past, now = past + done, max(now, next_s)
        if past >= tokens:
            break
    return now + _seconds(sizes[-1], past, tokens - past) if past < tokens else free_s[-1]


def largest_gain(latency: Eq1Latency) -> float:
    """Return the largest gain of one request over all queues and lengths."""
    best = 1.0
    for count in (2, 3):
        for chosen in combinations(latency.sizes, count):
            sizes = [latency.sizes[sp] for sp in chosen]
            for tokens in LENGTHS:
                alone = [_seconds(at, 0.0, tokens) for at in sizes]
                for free_s in _queues(alone):
                    # a request may also wait for a larger group, or take any smaller one, with one chunk
                    single = min(wait + whole for wait, whole in zip(free_s, alone, strict=True))
                    best = max(best, single / min(single, chunked_s(sizes, free_s, tokens)))
    return best


def _queues(alone: list[float]) -> Iterator[list[float]]:
    """Yield when each size is free: the smallest now, larger ones up to when a smaller one would have ended."""
    for first in np.linspace(0.02, 1.0, WAITS):
        second = float(first) * alone[0]
        if len(alone) == 2:
            yield [0.0, second]
        else:
            yield from ([0.0, second, second + float(more) * alone[1]] for more in np.linspace(0.05, 1.0, WAITS // 4))


def simulated_gain(workload: str, rps: float, spans: Eq1Latency, cv: float, count: int) -> float:
    """Return the median TTFT of single-chunk plans over CDSP's."""
    spec = replace(prefill_cluster("8b"), spans=spans)
    drawn = preset(f"tetris-{workload}").draw(
        np.random.default_rng([0, 1]), arrivals("poisson" if cv == 1.0 else "gamma", rps, cv), count
    )
    requests = [TraceRequest(r.arrival_s, r.prompt_tokens, 1) for r in drawn]
    medians = []
    for single in (True, False):
        placement = make_placement("tetris", spec.policy_context, {"rate": 0.5, "single_chunk": single})
        records = simulate_cluster(spec, placement, requests, RunSpec(seed=0)).sim.records
        medians.append(float(np.median([ttft_s(record) for record in records[count // 10 :]])))
    return medians[0] / medians[1]


def run(options: RunOptions) -> ExperimentReport:
    """See the module."""
    gains = {words: largest_gain(with_history(times)) for words, times in HISTORY.items()}
    count = 60 if options.quick else 1000
    variants = {"as is": (2.0, 1.0), "c = 0": (0.0, 1.0), "bursty": (2.0, BURSTY_CV), "c = 0, bursty": (0.0, BURSTY_CV)}
    loads = {"medium": NEAR_CRITICAL["medium"]} if options.quick else NEAR_CRITICAL
    found = {
        f"{workload}, {words}": simulated_gain(workload, rps, with_history(times), cv, count)
        for workload, rps in loads.items()
        for words, (times, cv) in variants.items()
    }
    rows = (
        judge_same(
            "One request: the largest gain of any chunking over a single chunk, all queues and lengths, by Eq. (1)",
            None,
            every(at_most(LEAST), "cost of history"),
            gains,
            f"Fig. 13 reports {LEAST} to 4.17 at the P50: no single request can gain as much.",
        ),
        judge_same(
            "All requests: median TTFT of single-chunk plans over CDSP's near the critical load, simulated",
            None,
            every(at_most(LEAST), "variant"),
            found,
            "Neither a history without cost nor bursty arrivals bring the gains of Fig. 13.",
        ),
    )
    lines = {words: [(float(at), found[f"{w}, {words}"]) for at, w in enumerate(loads)] for words in variants}
    panel = ReportChart(title="Gain of chunks, simulated", x="workload (short, medium, long)", y="times", lines=lines)
    scenario = f"Llama-3 8B, 16 A100s; {count:,} requests at {', '.join(f'{r:g}' for r in loads.values())}/s"
    origin = source(eq1.tetris_table1().source, scenario, [0])
    return ExperimentReport(source=origin, rows=rows, panels=(panel,))
