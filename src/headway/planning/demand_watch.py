"""Watch a simulation of a candidate, and stop it once a demand is missed for certain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headway.planning.question import LatencyDemand
from headway.sim.metrics import NO_TARGETS, RequestRecord
from headway.sim.metrics import definitions as d
from headway.sim.records import SimulatedRequest, record_of
from headway.sim.workload import TraceRequest

BACKLOG = "keeping up with arrivals"
"""What a candidate misses whose requests are not served long after the last one came. Percentiles of the gaps between
tokens would not show it: a request that waits for hours for its second token has one long gap and hundreds of short
ones."""

OUTRUN = "the margin of another plan of this cost"
"""What a candidate misses that was stopped because it can no longer be the plan with the widest margin."""

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
        ratio: share of each limit that counts as missed."""
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

    def look(self, now_s: float, ended: int) -> None:
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
