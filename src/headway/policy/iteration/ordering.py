"""In which order do waiting prefills go? A policy gives each request a *line* in time.

urgency(now) = intercept - slope * now, and the smallest goes first. FCFS, EDF, LRS, SRPT and LARS are all lines, which
only change when a request's own progress does; so keys are never computed in a comparator, nobody reads a clock, and
a thousand waiting requests are ordered by one vector operation.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from headway.core.errors import ConfigError


class PrefillFacts(msgspec.Struct, frozen=True, gc=False):
    """What a policy may know of a waiting or half-done prefill. Seconds; deadline and arrival are absolute.

    total_s: its isolated prefill time (uncached tokens); remaining_s: what of that is left.
    """

    arrival_s: float
    deadline_s: float
    total_s: float
    remaining_s: float


class UrgencyLine(msgspec.Struct, frozen=True, gc=False):
    intercept: float
    slope: float


class OrderingPolicy(Protocol):
    """Pure and stateless. Ties are broken by (arrival, order of submission), by the queue.

    parallel: all lines of this policy have the same slope, so that the order of two requests never turns by itself.
    """

    name: str
    parallel: bool

    def line(self, facts: PrefillFacts) -> UrgencyLine:
        """Called when a request arrives and after each of its chunks."""


def relative_slack(facts: PrefillFacts, now: float) -> float:
    """Medha §4.1: rho = (a + d - t - w(t)) / w_total, with its sign (negative: the deadline cannot be met alone)."""
    return (facts.deadline_s - now - facts.remaining_s) / max(facts.total_s, 1e-9)


POLICIES = ("fcfs", "edf", "lrs", "srpt", "lars")


def make_policy(name: str) -> OrderingPolicy:
    """The policy of that name; raises ConfigError with the names that exist."""
    from headway.policy.iteration import edf, fcfs, lars, lrs, srpt

    known: dict[str, OrderingPolicy] = {
        policy.name: policy
        for policy in (fcfs.FcfsPolicy(), edf.EdfPolicy(), lrs.LrsPolicy(), srpt.SrptPolicy(), lars.LarsPolicy())
    }
    if name not in known:
        raise ConfigError(f"unknown scheduling policy {name!r}: choose one of {', '.join(POLICIES)}")
    return known[name]
