"""How fast prefills advance beside the running decodes, and the time to first token that follows for a new request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import NamedTuple

from headway.core.errors import PredictedLateError
from headway.core.request import Request
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s
from headway.policy.iteration.base import InstanceScheduler
from headway.policy.iteration.ordering import UrgencyLine, relative_slack
from headway.policy.iteration.prefill import PrefillState

LONGEST_RETRY_S = 60.0
"""Longest time after which a refused client is asked to try again, seconds."""
_LEAST = 0.05
"""However long the decodes take, prefills advance (`progress_every`)."""


def prefill_speed(latency: LatencyModel, decodes: BatchLoad, budget_s: float) -> float:
    """Return the isolated prefill seconds that a second of iterations of `budget_s` does beside these decodes."""
    if not decodes.decodes or budget_s <= 0:
        return 1.0
    # The fixed cost of an iteration is part of isolated times, and paid once for both.
    beside_s = load_s(latency, decodes) - latency.rows_s(1)
    return min(1.0, max(_LEAST, 1.0 - beside_s / budget_s))


class WorkAhead(NamedTuple):
    """A waiting prefill that is more urgent than a newcomer."""

    priority: int
    urgency: float
    """Now; the smallest goes first."""
    order: int
    """Of arrival; breaks ties."""
    overtaken_s: float
    """Seconds from now until the newcomer is more urgent; infinite where it never is."""
    state: PrefillState


def predicted_ttft_s(
    newcomer: PrefillState,
    line: UrgencyLine,
    waiting: Iterable[tuple[PrefillState, UrgencyLine]],
    speed: float,
    now: float,
    yields: tuple[float, float] | None = None,
) -> float:
    """Return when a request that comes `now` would have its first token, in seconds after its arrival.

    What is more urgent now goes first until the newcomer's urgency overtakes it; none that comes later does. `newcomer`
    has been assessed. `yields`: least and largest share of the time that a prompt yields to smaller ones; None: they
    yield none."""
    ahead = sorted(_ahead(newcomer, line, waiting, now))
    wait_s = _done_s(ahead, speed) + newcomer.work_s / speed
    larger = [each.state for each in ahead if each.state.size > newcomer.size]
    if yields is not None and larger:
        # It advances beside the most urgent larger prompt, in the share that this yields.
        first = larger[0]
        share = min(yields[1], max(yields[0], relative_slack(first.facts(first.work_s), now)))
        # Nothing is yielded to a lower priority.
        if share > 0 and newcomer.request.priority <= first.request.priority:
            beside = speed * share
            others = [each for each in ahead if each.state.size <= newcomer.size]
            wait_s = min(wait_s, _done_s(others, beside) + newcomer.work_s / beside)
    return now - newcomer.request.arrival_s + wait_s


def _ahead(
    newcomer: PrefillState, line: UrgencyLine, waiting: Iterable[tuple[PrefillState, UrgencyLine]], now: float
) -> Iterator[WorkAhead]:
    """Yield what is more urgent than the newcomer now."""
    mine = (newcomer.request.priority, line.intercept - line.slope * now)
    for state, other in waiting:
        priority, urgency = state.request.priority, other.intercept - other.slope * now
        if (priority, urgency) > mine:
            continue
        # Priorities never change; of two lines the steeper one falls below the other.
        gains = line.slope - other.slope if priority == mine[0] else 0.0
        overtaken_s = (mine[1] - urgency) / gains if gains > 0 else inf
        yield WorkAhead(priority, urgency, state.order, overtaken_s, state)


def _done_s(ahead: Iterable[WorkAhead], speed: float) -> float:
    """Return the seconds until each of these, in order, has ended or is overtaken."""
    done_s = 0.0
    for each in ahead:
        done_s = max(done_s, min(done_s + each.state.work_s / speed, each.overtaken_s))
    return done_s


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
