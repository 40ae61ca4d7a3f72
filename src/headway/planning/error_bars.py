"""Error bars of a plan: what its latencies would be if iterations took as much more, or less, as predictions may err.

The latency model's own error (`perf.latency.error_band`) is of iterations. Queueing makes more of it, the closer a
deployment is to its capacity, so the plan is simulated again with all iterations longer, and all shorter, by that
share, while the scheduler goes on predicting as before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.perf.hardware.accelerators import accelerator
from headway.perf.latency.error_band import ErrorBand, prefill_band
from headway.planning.candidates import DeploymentCandidate, shape_of
from headway.planning.demand_watch import of_class
from headway.planning.measure_runner import MeasureRunner
from headway.planning.question import PlanQuestion
from headway.planning.search import PlanResult
from headway.planning.simulate import CandidateMeasure, SimulationJob, workload_of
from headway.sim.build import latency_of


class PlanErrorBars(NamedTuple):
    """The demanded latencies of one plan, at both ends of the error of its iteration times."""

    band: ErrorBand
    predicted: CandidateMeasure
    slow: CandidateMeasure
    """With iterations that take (1 + share) times as predicted."""
    fast: CandidateMeasure
    """With iterations that take 1 / (1 + share) times as predicted."""

    def range_s(self, demand: int) -> tuple[float, float]:
        """Return a demand's least and greatest value, seconds: the worst seed's at each end, and as predicted (other
        iteration times make other batches, so that neither end need be the extreme)."""
        values = [one.worst_s(demand) for one in (self.fast, self.predicted, self.slow)]
        return min(values), max(values)


def error_bars(result: PlanResult, runner: MeasureRunner | None = None) -> PlanErrorBars | None:
    """Return the error bars of a search's plan, or of the nearest one; None where nothing ran to its end. runner: None:
    simulated in this process."""
    one = result.best or result.nearest
    if one is None or not one.complete():
        return None
    band = widest_band(result.question, one.candidate)
    if band is None:
        return None
    job = SimulationJob(result.question, one.candidate, to_the_end=True)
    biased = [job._replace(bias=bias) for bias in (1.0 + band.share, 1.0 / (1.0 + band.share))]
    slow, fast = (runner or MeasureRunner()).measure(biased)
    return PlanErrorBars(band, one, slow, fast) if slow.complete() and fast.complete() else None


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
