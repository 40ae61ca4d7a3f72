"""Simulate one candidate until its demands are met, or until it is certain that one cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headway.planning.candidates import DeploymentCandidate
from headway.planning.demand_watch import (
    BACKLOG,
    FAILED_S,
    DemandWatch,
    HopelessError,
    drained_by_s,
    least_percentile,
    most_values,
    tolerated,
    values_of,
)
from headway.planning.question import LatencyDemand, PlanQuestion
from headway.sim.build import instance_of, run_of
from headway.sim.cluster.build import cluster_of, placement_of
from headway.sim.cluster.simulation import ClusterSimulation
from headway.sim.memory import InfeasibleError
from headway.sim.metrics import RequestRecord
from headway.sim.metrics import definitions as d
from headway.sim.metrics.quantiles import quantile
from headway.sim.records import SimulatedRequest
from headway.sim.requests import requests_of
from headway.sim.result import SimResult
from headway.sim.scenario import NoiseSection
from headway.sim.simulation import InstanceSimulation
from headway.sim.workload import TraceRequest


class SeedMeasure(NamedTuple):
    """One seed of one candidate."""

    values_s: tuple[float, ...]
    """The demanded percentile of each demand, seconds; infinite where too many requests failed. Empty: stopped
    before the end."""
    missed: str
    """A demand's name: it could no longer be met, so that the run was stopped. `OUTRUN`: stopped for another plan.
    `BACKLOG`: of a run that did not keep up, stopped or not. Empty: none of these."""
    stopped_s: float
    """Virtual seconds at the end."""
    goodput_rps: float
    idle_share: float
    queueing_share: float
    """Mean share of the time to first token that requests waited before their first iteration."""
    kv_peak_share: float
    mfu: float | None
    mbu: float | None
    preemptions: int
    least_s: tuple[float, ...] = ()
    """Of a run over a part of the workload: what each demand's percentile over all of it at least is if the part's
    requests have these latencies. Empty: of a run over all of it."""


@dataclass(frozen=True)
class CandidateMeasure:
    """All seeds of one candidate."""

    candidate: DeploymentCandidate
    seeds: tuple[SeedMeasure, ...]
    why: str = ""
    """Reason why it was not simulated; empty if it was."""

    def complete(self) -> bool:
        """Return whether every seed ran to its end."""
        return bool(self.seeds) and all(seed.values_s for seed in self.seeds)

    def worst_s(self, index: int) -> float:
        """Return a demand's value in the worst seed."""
        return max(seed.values_s[index] for seed in self.seeds)

    def ratio(self, demands: Sequence[LatencyDemand]) -> float:
        """Return the largest value as a share of its limit; infinite if a seed was stopped."""
        if not self.complete():
            return math.inf
        return max(self.worst_s(index) / demand.limit_s for index, demand in enumerate(demands))

    def keeps_up(self) -> bool:
        """Return whether every seed ran to its end without a backlog."""
        return self.complete() and not any(seed.missed for seed in self.seeds)

    def meets(self, demands: Sequence[LatencyDemand]) -> bool:
        """Return whether this is a plan: it keeps up, and meets every demand."""
        return self.keeps_up() and self.ratio(demands) <= 1.0

    def least_ratio(self, demands: Sequence[LatencyDemand]) -> float:
        """Return the largest `least_s` as a share of its limit; 0 of runs over all of the workload."""
        shares = [one / demand.limit_s for s in self.seeds for one, demand in zip(s.least_s, demands, strict=False)]
        return max(shares, default=0.0)

    def rank(self, demands: Sequence[LatencyDemand]) -> tuple[bool, float, float, float]:
        """Return a key that sorts what comes closest to the demands first; of stopped ones, what got furthest."""
        stopped_s = sum(seed.stopped_s for seed in self.seeds)
        return not self.keeps_up(), self.least_ratio(demands), self.ratio(demands), -stopped_s


class SimulationJob(NamedTuple):
    """One candidate to be simulated, as sent to another process."""

    question: PlanQuestion
    candidate: DeploymentCandidate
    requests: int | None = None
    """Only the busiest so many requests in a row; None: all of them."""
    to_the_end: bool = False
    """Do not stop when a demand cannot be met any more."""
    ratio: float = 1.0
    """Stop when some latency is certain to exceed this share of its limit: below 1, the best plan's of this cost."""
    bias: float = 1.0
    """Iterations take so many times what is predicted (`planning.error_bars`); searches have 1."""

    @property
    def key(self) -> MeasureKey:
        return self.candidate, self.requests, self.to_the_end, self.ratio, self.bias


MeasureKey = tuple[DeploymentCandidate, int | None, bool, float, float]
"""What determines a measure of a question: the job's `candidate`, `requests`, `to_the_end`, `ratio` and `bias`."""

_KEPT_WORKLOADS = 8
"""Seeds of one question that are kept."""
_workloads: dict[tuple[str, float | None, int], list[TraceRequest]] = {}
"""Workloads by (section, window, seed): a process simulates many candidates on the same requests."""


def measure(job: SimulationJob) -> CandidateMeasure:
    """Simulate every seed, up to the first that fails."""
    seeds: list[SeedMeasure] = []
    for seed in job.question.seeds:
        try:
            seeds.append(_simulate(job, seed))
        except InfeasibleError as error:
            return CandidateMeasure(job.candidate, (), str(error))
        if seeds[-1].missed and not job.to_the_end:
            break
    return CandidateMeasure(job.candidate, tuple(seeds))


def workload_of(question: PlanQuestion, seed: int) -> list[TraceRequest]:
    """Return the requests of one seed, in order of arrival. Do not change the list: further calls return it too."""
    key = (question.workload.model_dump_json(), question.window_s, seed)
    found = _workloads.get(key)
    if found is None:
        if len(_workloads) >= _KEPT_WORKLOADS:
            _workloads.clear()
        found = _workloads[key] = requests_of(question.workload, question.window_s, seed)
    return found


def _simulate(job: SimulationJob, seed: int) -> SeedMeasure:
    question, scenario = job.question, job.candidate.scenario(job.question)
    workload = workload_of(question, seed)
    requests = workload if job.requests is None else busiest(workload, job.requests)
    # the window cuts arrivals, not answers: a plan is judged by whole requests
    section = scenario.run.model_copy(update={"window_s": None, "noise": NoiseSection(bias=job.bias)})
    run = run_of(scenario.model_copy(update={"run": section}), seed)
    demands = question.demand_list()
    capacity = 1
    simulation: InstanceSimulation | ClusterSimulation
    live: Callable[[], Sequence[SimulatedRequest]]
    if job.candidate.decoders:
        spec = cluster_of(scenario, workload)
        cluster = simulation = ClusterSimulation(spec, placement_of(scenario, spec), requests, run)
        capacity = max(i.capacity for i in spec.instances)
        live = lambda: cluster.requests  # noqa: E731
    else:
        instance = instance_of(scenario, workload)
        single = simulation = InstanceSimulation(instance, requests, run, None)
        capacity = instance.kv_tokens * instance.config.kv_parallel
        live = lambda: single.tracks  # noqa: E731
    watch = DemandWatch(demands, requests, workload, live, job.ratio)
    try:
        simulation.run_events(None if job.to_the_end else watch.look)
    except HopelessError as stop:
        return SeedMeasure((), stop.missed, stop.at_s, 0.0, 0.0, 0.0, 0.0, None, None, 0)
    result = simulation.result()
    sim = result if isinstance(result, SimResult) else result.sim
    late = sim.duration_s + requests[0].arrival_s > drained_by_s(demands, requests)
    measured = _measured(sim, demands, capacity, BACKLOG if late else "")
    if job.requests is None:
        return measured
    return measured._replace(least_s=tuple(_least_s(demand, sim.records, workload) for demand in demands))


def busiest(workload: list[TraceRequest], count: int) -> list[TraceRequest]:
    """Return the `count` requests in a row that bring the most tokens, of prompts and answers, a second; of several
    such the first. Of a workload whose requests wait for answers, the first `count`."""
    if count >= len(workload) or any(request.waits for request in workload):
        return workload[:count]
    tokens = np.cumsum([0, *(request.prompt_tokens + request.output_tokens for request in workload)])
    arrivals = np.array([request.arrival_s for request in workload])
    seconds = arrivals[count - 1 :] - arrivals[: len(workload) - count + 1]
    # many requests may arrive at one instant
    first = int(np.argmax((tokens[count:] - tokens[:-count]) / np.maximum(seconds, 1e-9)))
    return workload[first : first + count]


def _measured(result: SimResult, demands: Sequence[LatencyDemand], capacity: int, missed: str) -> SeedMeasure:
    waits = [
        d.queueing_s(r) / first  # type: ignore[operator]
        for r in result.records
        if (first := d.ttft_s(r)) and r.scheduled_s is not None
    ]
    return SeedMeasure(
        values_s=tuple(_value_s(demand, result.records) for demand in demands),
        missed=missed,
        stopped_s=result.duration_s,
        goodput_rps=sum(map(d.is_good, result.records)) / result.duration_s if result.duration_s else 0.0,
        idle_share=result.idle_share,
        queueing_share=float(np.mean(waits)) if waits else 0.0,
        kv_peak_share=max((use.kv_peak_tokens for use in result.replicas), default=0) / capacity,
        mfu=result.mfu,
        mbu=result.mbu,
        preemptions=sum(use.preemptions for use in result.replicas),
    )


def _value_s(demand: LatencyDemand, records: Iterable[RequestRecord]) -> float:
    value = quantile(_sample(demand, records), demand.percent)
    # no value: every request of the class has a single token, so that there are no gaps to be late
    return 0.0 if value is None else _latency_s(value)


def _least_s(demand: LatencyDemand, records: Iterable[RequestRecord], workload: Sequence[TraceRequest]) -> float:
    few = tolerated(most_values(demand, workload), demand.percent)
    return _latency_s(least_percentile(_sample(demand, records), few))


def _sample(demand: LatencyDemand, records: Iterable[RequestRecord]) -> list[float]:
    return [v for r in records if demand.klass in ("all", r.klass) for v in values_of(demand, r)]


def _latency_s(value_s: float) -> float:
    return math.inf if value_s > 1e-3 * FAILED_S else value_s
