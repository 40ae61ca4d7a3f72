"""How fast prefills advance beside the running decodes, and the refusal of requests that would be late."""

from __future__ import annotations

from headway.core.errors import PredictedLateError
from headway.core.request import Request
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s
from headway.policy.iteration.base import InstanceScheduler

LONGEST_RETRY_S = 60.0
"""Longest time after which a refused client is asked to try again, seconds."""
_LEAST = 0.05
"""However long the decodes take, prefills advance (`fill.PROGRESS_EVERY`)."""


def prefill_speed(latency: LatencyModel, decodes: BatchLoad, budget_s: float) -> float:
    """Return the isolated prefill seconds that a second of iterations of `budget_s` does beside these decodes."""
    if not decodes.decodes or budget_s <= 0:
        return 1.0
    # The fixed cost of an iteration is part of isolated times, and paid once for both.
    beside_s = load_s(latency, decodes) - latency.rows_s(1)
    return min(1.0, max(_LEAST, 1.0 - beside_s / budget_s))


def refuse_late(scheduler: InstanceScheduler, request: Request, now: float) -> None:
    """Raise PredictedLateError for a request that asked to be refused rather than late and is predicted to be late."""
    ttft_s = request.slo.ttft_s
    if not request.slo.refuse_late or ttft_s is None:
        return
    predicted_s = scheduler.predicted_ttft_s(request, now)
    if predicted_s <= ttft_s:
        return
    raise PredictedLateError(
        f"the first token would come after {predicted_s:.3g} s, later than the {ttft_s:g} s asked for ('refuse_late'); "
        "try again later, or ask for a later one",
        # By then what is ahead has advanced by as much as is missing.
        min(predicted_s - ttft_s, LONGEST_RETRY_S),
        predicted_s,
    )
