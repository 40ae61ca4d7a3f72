"""The one setting of Tetris's figures 8 to 13 (§7.1). Nothing is tuned per figure.

8b: Llama-3 8B, two nodes of eight A100s prefill with tp 1 (16 instances), two nodes decode; times of chunks from
Eq. (1) fitted to the paper's Table 1. 70b: Llama-3 70B, four nodes prefill with tp 4 (8 instances), four decode; its
latencies are not published, so chunks come from one instance's operator fits on a ring (`perf.latency.groups`), and
Eq. (1) is fitted to those. Lengths: truncated log-normals with the published minimum, maximum and mean; Poisson
arrivals; 3,000 requests a run, of which the first tenth is left out; seeds 0, 1, 2.

Decode instances have no effect on TTFT, so runs that measure TTFT alone ask for one token of output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from headway.perf.hardware import ParallelLayout, accelerator, model
from headway.perf.latency import eq1
from headway.perf.latency.device_fit import EngineAssumptions
from headway.perf.latency.eq1 import Eq1Latency
from headway.perf.latency.fitted import fitted
from headway.perf.latency.groups import RingLatency
from headway.perf.latency.table import TableLatency, TableSource
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.placement.contract import ClusterInstance, ClusterLinks
from headway.policy.placement.registry import make_placement
from headway.sim.build import plan_memory
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.cluster.state import ClusterResult, ClusterSpec
from headway.sim.metrics import ttft_s
from headway.sim.spec import InstanceSpec, NoiseSpec, RunSpec
from headway.sim.workload import TraceRequest
from headway.sim.workload.generate import PoissonArrivals, preset
from headway_research.base import RunOptions, SimulationCache, source

WORKLOADS = ("short", "medium", "long")
REQUESTS = 3000
SEEDS = (0, 1, 2)
# the load that latencies are normalised to
LIGHT_RPS = 0.1
# the grid of rates of each cluster and workload, requests a second
LOADS: dict[tuple[str, str], tuple[float, ...]] = {
    ("8b", "short"): tuple(1.0 + 0.5 * k for k in range(14)),
    ("8b", "medium"): tuple(0.5 + 0.5 * k for k in range(10)),
    ("8b", "long"): tuple(0.5 + 0.25 * k for k in range(9)),
    ("70b", "short"): tuple(0.25 + 0.25 * k for k in range(9)),
    ("70b", "medium"): tuple(0.2 + 0.2 * k for k in range(8)),
    ("70b", "long"): tuple(0.1 + 0.1 * k for k in range(9)),
}

Fields = tuple[tuple[str, Any], ...]


class TetrisSystem(NamedTuple):
    """A placement policy and its options."""

    policy: str
    options: Fields = ()
    profiled: bool = False
    """Its improvement rates come from the profiler (`rates`)."""
    noisy: bool = False
    """The profiler's runs have the execution noise of the point; otherwise none."""


SYSTEMS: dict[str, TetrisSystem] = {
    "Fixed-SP16": TetrisSystem("fixed-sp", (("sp", 16),)),
    "Fixed-SP8": TetrisSystem("fixed-sp", (("sp", 8),)),
    "LoongServe disaggregated": TetrisSystem("loongserve", (("prefill", "greedy"),)),
    "LoongServe, rounds": TetrisSystem("loongserve", (("prefill", "single"),)),
    "LoongServe, batches": TetrisSystem("loongserve"),
    "Ladder": TetrisSystem("ladder"),
    "Tetris": TetrisSystem("tetris", (), True),
    "Tetris, single chunk": TetrisSystem("tetris", (("single_chunk", True),), True),
    "Tetris, open loop": TetrisSystem("tetris", (("anchored", False),), True),
    "Tetris, rates under noise": TetrisSystem("tetris", (), True, True),
    **{f"Tetris, rate {rate}": TetrisSystem("tetris", (("rate", rate),)) for rate in (0.1, 0.3, 0.5, 0.7)},
}


class TetrisPoint(NamedTuple):
    """The inputs of one simulation. Two runs with equal points have equal results."""

    cluster: str
    workload: str
    system: str
    rps: float
    requests: int
    seed: int
    noise: float = 0.0
    """Standard deviation of ln(time of a span / its predicted time)."""
    rates: tuple[tuple[float, float], ...] = ()
    """Improvement rates by load, (requests/s, rate); empty: the policy's own."""


class TetrisResult(NamedTuple):
    """The figures of one simulation. TTFT in seconds."""

    p50: float
    p99: float
    mean: float
    tokens_per_s: float
    """Prompt tokens a second, from the first arrival to the last first token."""
    chunked: float
    """Share of requests with more than one chunk."""


@cache
def spans_of(cluster: str) -> tuple[Any, Any, ClusterLinks]:
    """Return (latency of spans, model shape, links) of a cluster by name."""
    device = accelerator("a100-80gb")
    links = ClusterLinks(inside=device.inside, across=device.across)
    if cluster == "8b":
        return eq1.tetris_table1(), model("llama-3-8b"), links
    shape = model("llama-3-70b")
    instance = fitted(device, "llama-3-70b", ParallelLayout(tp=4), assumptions=EngineAssumptions(engine="headway"))
    ring = RingLatency(instance, shape, links.inside, links.across, tp=4)
    return eq1.fit_to(ring, (1, 2, 4, 8), node=2), shape, links


def instance_latency(spans: Eq1Latency) -> TableLatency:
    """Return Eq. (1) for one instance as the latency model of its iterations; prefills only.

    The constant and the linear term are the cost of an iteration and of a row, the quadratic ones a chunk's attention.
    """
    at = spans.sizes[1]
    # T = a + b·L + c·C·L + d·L² (Tetris Eq. 1), tabulated every 32 tokens
    knots = range(0, 16_385, 32)
    source = TableSource(
        fingerprint="eq1 sp1",
        provenance=spans.source,
        status="derived",
        tokens=((0, at.a), (16_384, at.a + 16_384 * at.b)),
        chunks=tuple((n, at.d * n * n, at.c * n) for n in knots),
        decode=(0.0, 0.0, 0.0),
    )
    return TableLatency(source)


def prefill_cluster(cluster: str) -> ClusterSpec:
    """Return a cluster's prefill instances alone, with the KV that 0.9 of their memory holds beside the weights."""
    spans, shape, links = spans_of(cluster)
    count, per_node, tp = (16, 8, 1) if cluster == "8b" else (8, 2, 4)
    config = SchedulerConfig()
    kv_tokens = plan_memory(
        accelerator("a100-80gb"), shape, ParallelLayout(tp=tp), config, (1, 1), utilisation=0.9
    ).kv_tokens
    instances = tuple(
        ClusterInstance(id=i, node=i // per_node, role="prefill", tp=tp, capacity=kv_tokens) for i in range(count)
    )

    def engine(group: Sequence[ClusterInstance]) -> InstanceSpec:
        return InstanceSpec(
            config=config, latency=instance_latency(spans), kv_tokens=sum(instance.capacity for instance in group)
        )

    return ClusterSpec(instances=instances, engine=engine, spans=spans, shape=shape, links=links)


def requests_of(workload: str, rps: float, count: int, seed: int) -> list[TraceRequest]:
    """Return prompts of a trace, each with one token of output."""
    drawn = preset(f"tetris-{workload}").draw(np.random.default_rng([seed, 1]), PoissonArrivals(rps), count)
    return [TraceRequest(r.arrival_s, r.prompt_tokens, 1) for r in drawn]


def simulate_point(point: TetrisPoint) -> ClusterResult:
    """Simulate a point."""
    spec, system = prefill_cluster(point.cluster), SYSTEMS[point.system]
    options = dict(system.options) | ({"rates": point.rates} if point.rates else {})
    noise = NoiseSpec(kind="lognormal", amount=point.noise) if point.noise else NoiseSpec()
    workload = requests_of(point.workload, point.rps, point.requests, point.seed)
    placement = make_placement(system.policy, spec.policy_context, options)
    return simulate_cluster(spec, placement, workload, RunSpec(seed=point.seed, noise=noise))


def run_point(point: TetrisPoint) -> TetrisResult:
    """Simulate a point and return its figures. The first tenth of the requests is left out of latencies."""
    result = simulate_point(point)
    records = result.sim.records
    waits = np.array([ttft_s(record) for record in records[len(records) // 10 :]])
    p50, p99 = np.percentile(waits, (50, 99))
    tokens = sum(record.prompt_tokens for record in records)
    return TetrisResult(
        float(p50), float(p99), float(waits.mean()), tokens / result.sim.duration_s, result.chunked / len(records)
    )


RESULTS: SimulationCache[TetrisPoint, TetrisResult] = SimulationCache()


def measured(points: Iterable[TetrisPoint], options: RunOptions) -> dict[TetrisPoint, TetrisResult]:
    """Return the result of each distinct point, simulated where it is not there yet."""
    wanted = list(dict.fromkeys(points))
    RESULTS.ensure(wanted, run_point, options.jobs, options.on_progress)
    return {point: RESULTS[point] for point in wanted}


class TetrisStudy:
    """The points of a figure, as medians over seeds."""

    def __init__(self, options: RunOptions, cluster: str, requests: int = REQUESTS, every: int = 1) -> None:
        """`every`: step through the grid of rates; 1 takes all of them."""
        self.cluster, self.options, self._every = cluster, options, every
        self.requests = 60 if options.quick else requests
        self.seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
        self.workloads = WORKLOADS[1:2] if options.quick else WORKLOADS

    def loads(self, workload: str) -> tuple[float, ...]:
        """Return the simulated rates of a workload, requests a second."""
        loads = LOADS[self.cluster, workload]
        return loads[1 : len(loads) : 4] if self.options.quick else loads[:: self._every]

    def rates(self, workload: str, noise: float = 0.0) -> tuple[tuple[float, float], ...]:
        """Return the profiled table of improvement rates, (requests/s, rate)."""
        from headway_research.tetris.rates import profiled

        return profiled(self.cluster, workload, self.options, noise)

    def point(self, system: str, workload: str, rps: float, seed: int, noise: float = 0.0) -> TetrisPoint:
        of = SYSTEMS[system]
        rates = self.rates(workload, noise if of.noisy else 0.0) if of.profiled else ()
        return TetrisPoint(self.cluster, workload, system, rps, self.requests, seed, noise, rates)

    def ensure(
        self, systems: Iterable[str], loads: Mapping[str, Iterable[float]] | None = None, noise: float = 0.0
    ) -> None:
        """Simulate the points that have no result yet, light load included."""
        points = [
            self.point(system, workload, rps, seed, noise)
            for workload in self.workloads
            for system in systems
            for rps in (LIGHT_RPS, *(self.loads(workload) if loads is None else loads.get(workload, ())))
            for seed in self.seeds
        ]
        measured(points, self.options)

    def value(self, system: str, workload: str, rps: float, what: str, noise: float = 0.0) -> float:
        """Return the median over seeds of `what`, a field of `TetrisResult`."""
        points = [self.point(system, workload, rps, seed, noise) for seed in self.seeds]
        return float(median(getattr(m, what) for m in measured(points, self.options).values()))

    def light(self, workload: str, what: str) -> float:
        """Return the value that figures are normalised to: Tetris at 0.1 requests a second."""
        return self.value("Tetris", workload, LIGHT_RPS, what)

    def crossing(self, system: str, workload: str, times: float, what: str = "p50") -> float | None:
        """Return the rate at which a latency exceeds `times` its light-load value, log-linear between grid points.

        None when it does not within the grid.
        """
        limit = times * self.light(workload, what)
        loads = (LIGHT_RPS, *self.loads(workload))
        curve = [(rps, self.value(system, workload, rps, what)) for rps in loads]
        for (low, below), (high, above) in pairwise(curve):
            # the first crossing from below; noise may cross again
            if above > limit >= below:
                return low + (high - low) * (math.log(limit / below) / math.log(above / below))
        return None

    def source(self, **more: Any) -> dict[str, Any]:
        """Return the `source` of a report."""
        spans: Eq1Latency = spans_of(self.cluster)[0]
        count = {"8b": "16 prefill instances, tp 1, two nodes", "70b": "8 prefill instances, tp 4, four nodes"}
        scenario = (
            f"Llama-3 {self.cluster.upper()} on A100s, {count[self.cluster]}; Tetris-like lengths, Poisson, "
            f"{self.requests:,} requests a run without the first tenth"
        )
        return source(spans.source, scenario, self.seeds, **more)
