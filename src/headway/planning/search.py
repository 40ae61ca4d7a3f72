"""Find the cheapest candidate that meets every demand, and the error bars of its latencies.

Levels of equal cost are searched in ascending order, so the first level with a plan has the cheapest one: no heuristic
can miss it. Within a level closed-form bounds remove candidates that cannot do it. The others are first simulated on
the busiest part of the workload: what already misses more there than a percentile over the whole workload tolerates is
removed. That is exact unless requests before the part would have helped those in it. The rest is simulated in order of
what it reaches there, and stops as soon as a demand is certainly missed or, once one meets all demands, its margin is
certainly narrower, which is exact too (without `front`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from headway.core.errors import ConfigError
from headway.perf.hardware import ParallelLayout, accelerator
from headway.perf.latency.fitted import ErrorBand, prefill_band
from headway.planning.question import DeploymentCandidate, PlanQuestion, candidates_of, cost_of, memory_faults, shape_of
from headway.planning.simulate import (
    BACKLOG,
    CandidateMeasure,
    LeastWork,
    MeasureRunner,
    SimulationJob,
    falls_behind,
    least_late,
    least_work,
    of_class,
    tolerated,
    workload_of,
)
from headway.sim.build import classes_of, latency_of
from headway.sim.workload import TraceRequest
from headway.sim.workload.generate import check_classes

_PEAK_REQUESTS = 200
"""Fewest requests of the busiest part that candidates are first simulated on; a smaller workload is simulated at once,
in the order of the search space."""
_FIRST_WAVE = 2
"""Candidates of a level that run before a margin is known; each wave has twice as many as the one before."""
_DRAWS = 10
"""Draws of the error of iteration times; the first and the last are the ends of a band that holds nine of ten."""
_NEAREST = 3
"""Candidates that are simulated to the end where none meets the demands, to say what can be had."""


@dataclass(frozen=True)
class PlanResult:
    """All that was tried."""

    question: PlanQuestion
    best: CandidateMeasure | None
    """The cheapest plan that meets every demand, of several the one with the widest margin; None: there is none."""
    measures: tuple[CandidateMeasure, ...]
    """Every simulated candidate, in order; those that were stopped early too."""
    nearest: CandidateMeasure | None = None
    """Where no plan meets the demands: the one whose worst miss is the smallest."""
    candidates: int = 0
    """Size of the search space."""
    without_memory: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Layouts that do not fit, by (accelerator, layout), each with the numbers."""
    bounded: int = 0
    """Candidates that a closed-form bound removed."""
    missed_at_peak: int = 0
    """Candidates that missed a demand over the whole workload by what they missed in its busiest part."""
    requests: int = 0
    """Requests of the first seed."""


class PlanSearch:
    """One search."""

    def __init__(self, question: PlanQuestion, runner: MeasureRunner | None = None) -> None:
        """runner: simulates candidates; None: in this process. Raises ConfigError where the workload has no request of
        a demanded class."""
        self.question = question
        self.demands = question.demand_list()
        self._runner = runner or MeasureRunner()
        self._workloads = [workload_of(question, seed) for seed in question.seeds]
        self._measures: dict[DeploymentCandidate, CandidateMeasure] = {}
        self._missed_at_peak: dict[DeploymentCandidate, CandidateMeasure] = {}
        self._work: dict[tuple[str, ParallelLayout], LeastWork] = {}
        self._behind: set[DeploymentCandidate] = set()
        self._bounded = 0
        first, demanded = self._workloads[0], [one.klass for one in self.demands if one.klass != "all"]
        for klass in check_classes("demands.", demanded, first, partial(classes_of, question.workload), ", and `all`"):
            raise ConfigError(
                f"demands.{klass}: none of the {len(first)} requests that were drawn is of this class: more are "
                "needed (workload.requests, or window_s), or leave the demand out"
            )

    def run(self) -> PlanResult:
        """Search. Deterministic; the number of processes changes nothing."""
        question = self.question
        space = list(candidates_of(question))
        if not space:
            raise ConfigError("no layout of `search` fits the accelerators: allow smaller tp, stages or kvp, or more")
        faults = memory_faults(question, space, self._workloads[0])
        fitting = [c for c in space if (c.accelerator, c.layout.name) not in faults]
        best: CandidateMeasure | None = None
        # sorted is stable: within a level the order of the search space stays
        for _, level in groupby(sorted(fitting, key=self._cost), key=self._cost):
            for one in self._level(list(level)):
                if one.meets(self.demands):
                    best = self._better(best, one)
            if best is not None and not question.search.front:
                break
        nearest = None if best is not None or not fitting else self._nearest(fitting)
        return PlanResult(
            question, best, tuple(self._measures.values()), nearest, len(space), faults, self._bounded,
            len(self._missed_at_peak), len(self._workloads[0]),
        )  # fmt: skip

    def _cost(self, candidate: DeploymentCandidate) -> float:
        return cost_of(candidate, self.question)

    def _better(self, best: CandidateMeasure | None, one: CandidateMeasure) -> CandidateMeasure:
        """Return the cheaper one; of two at one cost, the one with the wider margin, then the first."""
        if best is None:
            return one
        mine, other = (self._cost(m.candidate) for m in (one, best))
        return one if mine == other and one.ratio(self.demands) < best.ratio(self.demands) else best

    def _level(self, level: list[DeploymentCandidate]) -> list[CandidateMeasure]:
        """Measure the candidates of one cost."""
        possible = [candidate for candidate in level if self._possible(candidate)]
        self._bounded += len(level) - len(possible)
        if self.question.search.front:
            return self._measure([SimulationJob(self.question, candidate) for candidate in possible])
        return self._race(possible)

    def _race(self, level: list[DeploymentCandidate]) -> list[CandidateMeasure]:
        """Measure the candidates of one cost in waves; each stops where its margin is narrower than the best so far.

        Exact: what stops has a ratio above the best's, so it is not the plan. Return them in the order of `level`,
        which decides between equal margins."""
        ordered, ratio, size = self._promising_first(level), 1.0, _FIRST_WAVE
        found: dict[DeploymentCandidate, CandidateMeasure] = {}
        while ordered:
            wave, ordered, size = ordered[:size], ordered[size:], 2 * size
            jobs = [SimulationJob(self.question, candidate, ratio=ratio) for candidate, _ in wave]
            found |= {one.candidate: one for one in self._measure(jobs)}
            ratio = min((one.ratio(self.demands) for one in found.values() if one.meets(self.demands)), default=1.0)
            # what its busiest part alone makes of the margin can only be too good
            ordered = [(candidate, least) for candidate, least in ordered if least <= ratio]
        return [found[candidate] for candidate in level if candidate in found]

    def _promising_first(self, level: list[DeploymentCandidate]) -> list[tuple[DeploymentCandidate, float]]:
        """Return the candidates that may meet the demands by what they do on the busiest part, the best first, each
        with the least share of its limits that it reaches over the whole workload."""
        requests = len(self._workloads[0]) // self.question.search.busiest_part
        if self.question.search.busiest_part == 1 or requests < _PEAK_REQUESTS:
            return [(candidate, 0.0) for candidate in level]
        measured = self._measure([SimulationJob(self.question, c, requests) for c in level], keep=False)
        left: list[CandidateMeasure] = []
        for one in measured:
            # a part that is not drained long after its last arrival may be the workload's end, or go on in a lull
            missed = any(seed.missed not in ("", BACKLOG) for seed in one.seeds)
            if missed:
                self._missed_at_peak[one.candidate] = one
            else:
                left.append(one)
        left.sort(key=lambda one: one.rank(self.demands))
        return [(one.candidate, one.least_ratio(self.demands)) for one in left]

    def _possible(self, candidate: DeploymentCandidate) -> bool:
        """Whether the closed-form bounds leave a chance to keep up, and to every demand on TTFT."""
        key = candidate.accelerator, candidate.layout
        if key not in self._work:
            self._work[key] = least_work(candidate, self.question)
        work = self._work[key]
        if any(falls_behind(candidate, self.question, mine, work) for mine in self._workloads):
            self._behind.add(candidate)
            return False
        for demand in self.demands:
            if demand.metric != "ttft":
                continue
            for workload in self._workloads:
                mine: Sequence[TraceRequest] = of_class(demand.klass, workload)
                late = least_late(work, candidate.replicas, mine, demand.limit_s) if mine else 0
                if late > tolerated(len(mine), demand.percent):
                    return False
        return True

    def _measure(self, jobs: list[SimulationJob], keep: bool = True) -> list[CandidateMeasure]:
        measured = self._runner.measure(jobs)
        if keep:
            self._measures |= {one.candidate: one for one in measured}
        return measured

    def _nearest(self, fitting: Sequence[DeploymentCandidate]) -> CandidateMeasure | None:
        """Return the candidate that comes closest, whatever it misses: of those that got furthest before they were
        stopped, and of those not known to fall behind with most accelerators that prefill, in the largest instances of
        fewest stages (gaps between tokens are missed later the slower a deployment is), one of each layout."""
        tried = self._measures or self._missed_at_peak
        far = sorted(tried.values(), key=lambda one: one.rank(self.demands))
        ordered = sorted(
            fitting,
            key=lambda c: (c in self._behind, -(c.accelerators - c.decoders * c.tp * c.stages), c.replicas, c.stages),
        )
        large: dict[tuple[Any, ...], DeploymentCandidate] = {}
        for one in ordered:
            # others of the same layout differ in policy and aim alone
            large.setdefault((one.accelerator, one.layout, one.replicas, one.decoders), one)
        furthest = [each.candidate for each in far if each.seeds][: _NEAREST - 1]
        chosen = list(dict.fromkeys([*furthest, *large.values()]))[:_NEAREST]
        done = [each for each in self._measures.values() if each.complete()]
        done += self._measure(
            [SimulationJob(self.question, candidate, None, to_the_end=True) for candidate in chosen], keep=False
        )
        return min(done, key=lambda one: one.rank(self.demands), default=None)


def pareto(measures: Sequence[CandidateMeasure], question: PlanQuestion) -> list[CandidateMeasure]:
    """Return the measures that keep up and that no other beats in cost and every demanded latency, cheapest first."""
    demands = question.demand_list()
    done = [one for one in measures if one.keeps_up()]
    rows = {
        one.candidate: (cost_of(one.candidate, question), *(one.worst_s(i) for i in range(len(demands))))
        for one in done
    }
    front = [
        one
        for one in done
        if not any(
            other != rows[one.candidate] and all(a <= b for a, b in zip(other, rows[one.candidate], strict=True))
            for other in rows.values()
        )
    ]
    return sorted(front, key=lambda one: rows[one.candidate])


# Error bars of a plan: what its latencies would be if iterations took as much more, or less, as predictions may err.
#
# The latency model's own error (`perf.latency.fitted`) is of iterations. Queueing makes more of it, the closer a
# deployment is to its capacity, so the plan is simulated again with all iterations longer, and all shorter, by that
# share, while the scheduler goes on predicting as before.


class PlanErrorBars(NamedTuple):
    """The demanded latencies of one plan, at both ends of the error of its iteration times."""

    band: ErrorBand
    predicted: CandidateMeasure
    slow: CandidateMeasure
    """With iterations that take (1 + share) times as predicted."""
    fast: CandidateMeasure
    """With iterations that take 1 / (1 + share) times as predicted."""
    meets: float
    """Share of draws of the error that meet all demands: `_DRAWS` quantiles, evenly spaced, of a lognormal error of
    which nine of ten lie within the band, both ends among them."""

    def range_s(self, demand: int) -> tuple[float, float]:
        """Return a demand's least and greatest value, seconds: the worst seed's at each end, and as predicted (other
        iteration times make other batches, so that neither need be the extreme). An end that falls behind: infinite."""
        values = [one.worst_s(demand) for one in (self.fast, self.predicted, self.slow)]
        return min(values), max(values)


def error_bars(result: PlanResult, runner: MeasureRunner | None = None) -> PlanErrorBars | None:
    """Return the error bars of a search's plan, or of the nearest one; None where nothing keeps up. runner: None:
    simulated in this process."""
    one = result.best or result.nearest
    if one is None or not one.complete():
        return None
    band = widest_band(result.question, one.candidate)
    if band is None:
        return None
    runner = runner or MeasureRunner()
    job = SimulationJob(result.question, one.candidate, to_the_end=True)
    biased = [job._replace(bias=bias) for bias in (1.0 + band.share, 1.0 / (1.0 + band.share))]
    slow, fast = runner.measure(biased)
    return PlanErrorBars(band, one, slow, fast, _share_met(result.question, one, slow, fast, band, runner))


def _share_met(
    question: PlanQuestion, one: CandidateMeasure, slow: CandidateMeasure, fast: CandidateMeasure, band: ErrorBand,
    runner: MeasureRunner,
) -> float:  # fmt: skip
    """Return `PlanErrorBars.meets`. Longer iterations are taken to miss what shorter ones do, so that halving finds the
    last draw that meets all demands in three or four simulations."""
    demands = question.demand_list()
    if not fast.meets(demands) and not one.meets(demands):
        return 0.0
    if slow.meets(demands):
        return 1.0
    end = NormalDist().inv_cdf(0.5 / _DRAWS)
    low, high = 0, _DRAWS - 1
    while high - low > 1:
        middle = (low + high) // 2
        bias = (1.0 + band.share) ** -(NormalDist().inv_cdf((middle + 0.5) / _DRAWS) / end)
        (drawn,) = runner.measure([SimulationJob(question, one.candidate, bias=bias)])
        low, high = (middle, high) if drawn.meets(demands) else (low, middle)
    return (low + 1) / _DRAWS


def widest_band(question: PlanQuestion, candidate: DeploymentCandidate) -> ErrorBand | None:
    """Return the widest band of a lone prompt's time over the demanded classes, each at the P90 of its lengths."""
    shape, device = shape_of(question), accelerator(candidate.accelerator)
    model = latency_of(question.latency, device, shape, candidate.layout)
    requests = workload_of(question, question.seeds[0])
    bands = []
    for klass in dict.fromkeys(demand.klass for demand in question.demand_list()):
        tokens = int(np.percentile([request.prompt_tokens for request in of_class(klass, requests)], 90))
        bands.append(prefill_band(model, tokens))
    return max((band for band in bands if band is not None), key=lambda band: band.share, default=None)
