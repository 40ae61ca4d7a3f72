"""Judge one candidate: by bounds in closed form, then by a simulation that stops once a demand is met or missed for
certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headway.perf.hardware import accelerator
from headway.perf.latency.base import MAX_CHUNK
from headway.planning.question import DeploymentCandidate, LatencyDemand, PlanQuestion, shape_of
from headway.sim import metrics as d
from headway.sim.build import InfeasibleError, instance_of, latency_of, requests_of, run_of
from headway.sim.cluster.build import cluster_of, placement_of
from headway.sim.cluster.simulation import ClusterSimulation
from headway.sim.loop import InstanceSimulation
from headway.sim.metrics import NO_TARGETS, RequestRecord, quantile
from headway.sim.result import SimResult, SimulatedRequest, record_of
from headway.sim.spec import NoiseSpec
from headway.sim.sweep import WorkerProcesses
from headway.sim.workload import TraceRequest

BACKLOG = "keeping up with arrivals"
"""What a candidate misses whose requests are not served long after the last one came. Percentiles of the gaps between
tokens would not show it: a request that waits for hours for its second token has one long gap and hundreds of short
ones."""

OUTRUN = "the margin of another plan of this cost"
"""What a candidate misses that was stopped because it can no longer be the plan with the widest margin."""

_ENDLESS = 10**9
"""Rows of an iteration in which fixed time has no part."""

FAILED_S = 1e12
"""Latency of a request that failed: finite, so that percentiles can be interpolated."""


def of_class(klass: str, requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Return the requests that a demand on `klass` counts."""
    return [request for request in requests if klass in ("all", request.klass)]


class HopelessError(Exception):
    """Ends a simulation in its midst."""

    def __init__(self, missed: str, at_s: float) -> None:
        self.missed, self.at_s = missed, at_s


def drained_by_s(demands: Sequence[LatencyDemand], requests: Sequence[TraceRequest]) -> float:
    """Return the virtual second at which a deployment that keeps up has answered everything: a tenth of the time of
    arrivals after the last one, and what the longest answer may take by the demands. Infinite where all requests arrive
    at once: there is no rate to keep up with."""
    first_arrival_s, last_s = (pick(request.arrival_s for request in requests) for pick in (min, max))
    if first_arrival_s == last_s:
        return math.inf
    gap_s = max((demand.limit_s for demand in demands if demand.metric in ("tbt", "max_tbt", "tpot")), default=0.2)
    first_s = max((demand.limit_s for demand in demands if demand.metric in ("ttft", "e2e")), default=0.0)
    longest = max(request.output_tokens for request in requests)
    return last_s + 0.1 * (last_s - first_arrival_s) + longest * gap_s + first_s


def values_of(demand: LatencyDemand, record: RequestRecord) -> list[float]:
    """Return what a demand counts of one request: its gaps, or one latency. A failed request counts as for ever."""
    if not record.ok:
        return [FAILED_S]
    if demand.metric == "tbt":
        return d.tbt_s(record)
    if demand.metric == "max_tbt":
        return [max(d.tbt_s(record), default=0.0)]
    known = {"ttft": d.ttft_s, "tpot": d.tpot_s, "e2e": d.e2e_s}[demand.metric](record)
    return [] if known is None else [known]


def tolerated(count: int, percent: float) -> int:
    """Return how many of `count` values may exceed a limit while the percentile can still meet it.

    The percentile interpolates between the values number floor(h) and floor(h) + 1, h = (count - 1) · percent / 100,
    counted from 0: with more values beyond the limit than lie above number floor(h), it exceeds the limit."""
    return count - 1 - math.floor((count - 1) * percent / 100 + 1e-9)


def least_percentile(values: Iterable[float], few: int) -> float:
    """Return a lower bound, from some of the values, of a percentile of latencies that tolerates `few` values above a
    limit."""
    largest = sorted(values, reverse=True)
    return largest[few] if len(largest) > few else 0.0


def _first_token_s(one: SimulatedRequest) -> float | None:
    """Return the time of the first token; in a cluster it may still be in the track of the instance that decodes."""
    track = getattr(one, "track", None)
    times = one.times or (track.times if track is not None else ())
    return times[0] if times else None


@dataclass
class _WatchedLimit:
    """A demand, with what has exceeded its limit so far."""

    demand: LatencyDemand
    limit_s: float
    tolerated: int
    missed: set[str] = field(default_factory=set)
    """TTFT: requests that are late."""
    over: int = 0
    """Other metrics: values of ended requests above the limit."""

    def counts(self, one: SimulatedRequest) -> bool:
        """Return whether the demand is on this request's class."""
        return self.demand.klass in ("all", one.source.klass)


class DemandWatch:
    """Counts values that have exceeded a limit for certain, as a simulation goes on, and sees backlogs.

    A request without a first token at arrival + limit has missed it whatever follows, and the gaps of an ended request
    stay as they are, so stopping once there are more than the percentile tolerates changes no verdict."""

    def __init__(
        self,
        demands: Sequence[LatencyDemand],
        requests: Sequence[TraceRequest],
        workload: Sequence[TraceRequest],
        live: Callable[[], Sequence[SimulatedRequest]],
        ratio: float = 1.0,
    ) -> None:
        """requests: those that are simulated, all of `workload` or a part, of whose latencies the percentiles are.
        ratio: share of each limit that counts as missed; infinite: backlogs alone are seen."""
        self._live = live
        self._ratio = ratio
        self._drained_by_s = drained_by_s(demands, requests)
        self._seen = 0
        # requests without a first token yet
        self._open: list[SimulatedRequest] = []
        # requests that have not ended, looked at only for demands on other metrics than TTFT
        self._running: list[SimulatedRequest] = []
        limits = [
            _WatchedLimit(demand, ratio * demand.limit_s, tolerated(most_values(demand, workload), demand.percent))
            for demand in demands
        ]
        self._ttft = [limit for limit in limits if limit.demand.metric == "ttft"]
        self._other = [limit for limit in limits if limit.demand.metric != "ttft"]

    def look(self, now_s: float) -> None:
        """Raise HopelessError once more requests have missed a limit than its percentile tolerates."""
        if now_s > self._drained_by_s:
            raise HopelessError(BACKLOG, now_s)
        tracks = self._live()
        self._open += tracks[self._seen :]
        if self._other:
            self._running += tracks[self._seen :]
            self._look_at_ended(now_s)
        self._seen = len(tracks)
        still: list[SimulatedRequest] = []
        for one in self._open:
            first_s = _first_token_s(one)
            # a request that ended without a token counts as late
            failed = first_s is None and one.ended_s is not None
            at_s = now_s if first_s is None else first_s
            self._count(one, math.inf if failed else at_s - one.request.arrival_s, now_s)
            if first_s is None and not failed:
                still.append(one)
        self._open = still

    def _look_at_ended(self, now_s: float) -> None:
        for one in self._running:
            if one.ended_s is None:
                continue
            record = record_of(one, NO_TARGETS)
            for limit in self._other:
                if limit.counts(one):
                    limit.over += sum(value > limit.limit_s for value in values_of(limit.demand, record))
                    self._check(limit, limit.over, now_s)
        self._running = [one for one in self._running if one.ended_s is None]

    def _count(self, one: SimulatedRequest, ttft_s: float, now_s: float) -> None:
        """ttft_s: the time to first token, or a lower bound of it."""
        for limit in self._ttft:
            if ttft_s > limit.limit_s and limit.counts(one):
                limit.missed.add(one.request.id)
                self._check(limit, len(limit.missed), now_s)

    def _check(self, limit: _WatchedLimit, over: int, now_s: float) -> None:
        if over > limit.tolerated:
            raise HopelessError(limit.demand.name if self._ratio >= 1 else OUTRUN, now_s)


def most_values(demand: LatencyDemand, requests: Sequence[TraceRequest]) -> int:
    """Return the most values that a percentile of this demand can be taken of."""
    mine = of_class(demand.klass, requests)
    # a failed request counts as one value
    return sum(max(1, one.output_tokens - 1) for one in mine) if demand.metric == "tbt" else len(mine)


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
    kept_up: float = 1.0
    """Where `missed` is `BACKLOG`: tokens computed a second, as a share of those that arrived a second."""
    least_s: tuple[float, ...] = ()
    """For a run over a part of the workload: the least that each demand's percentile over all of it can be, given the
    latencies of the part's requests. Empty: the run was over all of it."""


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
        """Return a demand's value in the worst seed; infinite if a seed was stopped."""
        return max(seed.values_s[index] for seed in self.seeds) if self.complete() else math.inf

    def ratio(self, demands: Sequence[LatencyDemand]) -> float:
        """Return the largest value as a share of its limit; infinite if a seed was stopped."""
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

    def kept_up(self) -> float:
        """Return the share of arrivals that the worst seed keeps up with."""
        return min((seed.kept_up for seed in self.seeds), default=0.0)

    def rank(self, demands: Sequence[LatencyDemand]) -> tuple[float, float, float, float]:
        """Return a key that sorts what comes closest to the demands first; of stopped ones, what got furthest."""
        stopped_s = sum(seed.stopped_s for seed in self.seeds)
        return -self.kept_up(), self.least_ratio(demands), self.ratio(demands), -stopped_s


class SimulationJob(NamedTuple):
    """One candidate to be simulated, as sent to another process."""

    question: PlanQuestion
    candidate: DeploymentCandidate
    requests: int | None = None
    """Only the busiest so many requests in a row; None: all of them."""
    to_the_end: bool = False
    """Stop for a backlog alone, not when a demand cannot be met any more."""
    ratio: float = 1.0
    """Stop when some latency is certain to exceed this share of its limit: below 1, the best plan's of this cost."""
    bias: float = 1.0
    """Iterations take so many times what is predicted (`planning.search`); searches have 1."""

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
    section = scenario.run.model_copy(update={"window_s": None, "noise": NoiseSpec(bias=job.bias)})
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
    watch = DemandWatch(demands, requests, workload, live, math.inf if job.to_the_end else job.ratio)
    try:
        simulation.run_events(watch.look)
    except HopelessError as stop:
        kept_up = _kept_up(_result_of(simulation), requests, stop.at_s) if stop.missed == BACKLOG else 1.0
        return SeedMeasure((), stop.missed, stop.at_s, 0.0, 0.0, 0.0, 0.0, None, None, 0, kept_up)
    sim = _result_of(simulation)
    measured = _measured(sim, demands, capacity)
    ended_s = sim.duration_s + requests[0].arrival_s
    if ended_s > drained_by_s(demands, requests):
        measured = measured._replace(missed=BACKLOG, kept_up=_kept_up(sim, requests, ended_s))
    if job.requests is None:
        return measured
    return measured._replace(least_s=tuple(_least_s(demand, sim.records, workload) for demand in demands))


def _result_of(simulation: InstanceSimulation | ClusterSimulation) -> SimResult:
    result = simulation.result()
    return result if isinstance(result, SimResult) else result.sim


def _kept_up(sim: SimResult, requests: Sequence[TraceRequest], at_s: float) -> float:
    """Return `SeedMeasure.kept_up` of a run that has gone on until `at_s`."""
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    computed = sim.spans.tokens + sum(use.prefill_tokens + use.decode_tokens for use in sim.replicas)
    return min(1.0, computed / sum(map(_tokens, requests)) * (last_s - first_s) / (at_s - first_s))


def _tokens(request: TraceRequest) -> int:
    return request.prompt_tokens + request.output_tokens


def busiest(workload: list[TraceRequest], count: int) -> list[TraceRequest]:
    """Return the `count` requests in a row that bring the most tokens, of prompts and answers, a second; of several
    such the first. Of a workload whose requests wait for answers, the first `count`."""
    if count >= len(workload) or any(request.waits for request in workload):
        return workload[:count]
    tokens = np.cumsum([0, *map(_tokens, workload)])
    arrivals = np.array([request.arrival_s for request in workload])
    seconds = arrivals[count - 1 :] - arrivals[: len(workload) - count + 1]
    # many requests may arrive at one instant
    first = int(np.argmax((tokens[count:] - tokens[:-count]) / np.maximum(seconds, 1e-9)))
    return workload[first : first + count]


def _measured(result: SimResult, demands: Sequence[LatencyDemand], capacity: int) -> SeedMeasure:
    waits = [
        d.queueing_s(r) / first  # type: ignore[operator]
        for r in result.records
        if (first := d.ttft_s(r)) and r.scheduled_s is not None
    ]
    return SeedMeasure(
        values_s=tuple(_value_s(demand, result.records) for demand in demands),
        missed="",
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


# Bounds in closed form of what no simulation need show: late prefills, and decodes that the KV cache is too small for.
#
# No machine exceeds its peak FLOP/s, and no iteration computes rows faster than the latency model's best size does: a
# prompt takes at least its rows and pairs at those rates, and all instances together at least the sum. A decode holds
# its request's KV, and no iteration is shorter than that of a single row.


class LeastWork(NamedTuple):
    """Least seconds that an instance (each of its stages) is busy."""

    row_s: float
    """For each row of an iteration."""
    pair_s: float
    """For each pair of a prompt's token and one that it attends to."""

    def prompt_s(self, request: TraceRequest) -> float:
        """Return the least seconds for a prompt's uncached part."""
        cached = max(0, min(request.cached_tokens, request.prompt_tokens - 1))
        new = max(1, request.prompt_tokens) - cached
        return self.row_s * new + self.pair_s * new * (cached + new / 2)


def least_work(candidate: DeploymentCandidate, question: PlanQuestion) -> LeastWork:
    """Return the least work of the candidate's layout: pairs at peak FLOP/s; rows at the latency model's best rate, or
    at peak where times vary as a server's did, and where groups share rows."""
    shape, device = shape_of(question), accelerator(candidate.accelerator)
    peak = device.flops * candidate.layout.accelerators
    row_s, pair_s = shape.linear_flops(1) / peak, shape.pairs_flops(1) / peak
    if candidate.kvp == 1 and question.latency.source != "table":
        model = latency_of(question.latency, device, shape, candidate.layout)
        rows = np.arange(1, 2 * MAX_CHUNK + 1)
        # beyond the table a row costs its slope
        row_s = min(float((model.token_s(1, rows.size) / rows).min()), model.rows_s(_ENDLESS) / _ENDLESS)
    return LeastWork(row_s, pair_s)


def least_late(work: LeastWork, instances: int, requests: Sequence[TraceRequest], limit_s: float) -> int:
    """Return a lower bound of the number of these requests whose first token is later than `limit_s`.

    Two bounds, the larger counts: prompts that one instance cannot compute in time even alone; and prompts that all
    prefilling instances together cannot compute by the last deadline, the smallest counted as done first.
    """
    each = sorted(work.prompt_s(request) for request in requests)
    alone = sum(seconds > limit_s for seconds in each)
    first_s, last_s = min(r.arrival_s for r in requests), max(r.arrival_s for r in requests)
    done = int(np.searchsorted(np.cumsum(each), instances * (last_s - first_s + limit_s), side="right"))
    return max(alone, len(each) - done)


def falls_behind(
    candidate: DeploymentCandidate, question: PlanQuestion, requests: list[TraceRequest], work: LeastWork
) -> bool:
    """Return whether the instances are too slow, or their KV caches too small, for all answers to end by
    `drained_by_s`, in whatever order.

    Each token of an answer after the first occupies its request's KV, in tokens, for at least one iteration through all
    stages; the product, summed over all answers, is at most the caches' size × the time there is."""
    time_s = drained_by_s(question.demand_list(), requests) - min(request.arrival_s for request in requests)
    steps = [max(0, request.output_tokens - 1) for request in requests]
    # separate instances decode where there are any
    rows = 0 if candidate.decoders else sum(steps)
    if sum(map(work.prompt_s, requests)) + work.row_s * rows > candidate.replicas * time_s:
        return True
    scenario = candidate.scenario(question)
    try:
        if candidate.decoders:
            spec = cluster_of(scenario, requests)
            kv_tokens = sum(instance.capacity for instance in spec.instances if instance.role == "decode")
            latency = spec.engine([spec.instances[-1]]).latency
        else:
            instance = instance_of(scenario, requests)
            kv_tokens = candidate.replicas * instance.kv_tokens * candidate.kvp
            latency = instance.latency
    except InfeasibleError:
        return False
    token_s = candidate.stages * latency.least_rows_s(1)
    held = sum(
        # a cached prefix may be shared; the cache grows by a token a step
        count * (request.prompt_tokens - request.cached_tokens) + count * (count - 1) // 2
        for count, request in zip(steps, requests, strict=True)
    )
    return held * token_s > kv_tokens * time_s


class MeasureRunner:
    """A context manager: its processes start with the first job and end with the `with` block."""

    def __init__(
        self,
        jobs: int = 1,
        on_measure: Callable[[SimulationJob, CandidateMeasure], None] = lambda job, one: None,
        known: Mapping[MeasureKey, CandidateMeasure] | None = None,
    ) -> None:
        """jobs: processes; 1: this one. `on_measure` is called after each simulation. known: results of earlier runs of
        the same question (`answer.read_measures`)."""
        self._workers = WorkerProcesses(jobs)
        self._on_measure = on_measure
        self._known = dict(known or {})

    def __enter__(self) -> MeasureRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.__exit__()

    def measure(self, jobs: Sequence[SimulationJob]) -> list[CandidateMeasure]:
        """Simulate what is not known yet; return the measures in the order of the jobs, whatever the processes."""
        missing = [job for job in jobs if job.key not in self._known]
        for job, one in zip(missing, self._workers.map(measure, missing), strict=True):
            self._known[job.key] = one
            self._on_measure(job, one)
        return [self._known[job.key] for job in jobs]
