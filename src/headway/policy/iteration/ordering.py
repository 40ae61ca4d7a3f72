"""Order of waiting prefills. A policy gives each request a *line* in time.

urgency(now) = intercept - slope * now, and the smallest goes first. FCFS, EDF, LRS, SRPT and LARS are all lines, which
only change when a request's own progress does: no comparator computes keys, no policy reads a clock, and one vector
operation orders a thousand waiting requests.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from headway.core.dotted_path import is_dotted, load_dotted
from headway.core.errors import ConfigError


class PrefillFacts(msgspec.Struct, frozen=True, gc=False):
    """Input of an ordering policy: one waiting or half-done prefill. Seconds."""

    arrival_s: float
    """Absolute."""
    deadline_s: float
    """Absolute: when the first token is due."""
    total_s: float
    """Isolated prefill time of its uncached tokens on arrival."""
    remaining_s: float
    """Part of `total_s` that is left."""


class UrgencyLine(msgspec.Struct, frozen=True, gc=False):
    """urgency(now) = intercept - slope * now; the smallest goes first."""

    intercept: float
    slope: float


class OrderingPolicy(Protocol):
    """Order of prefills. Pure and stateless; the queue breaks ties by order of arrival."""

    name: str
    parallel: bool
    """Whether all lines of this policy have the same slope: the order of two requests then never changes by itself."""

    def line(self, facts: PrefillFacts) -> UrgencyLine:
        """Return the line of a request. Called when it arrives and after each of its chunks."""


def relative_slack(facts: PrefillFacts, now: float) -> float:
    """Medha §4.1: rho = (a + d - t - w(t)) / w_total, with its sign (negative: the deadline cannot be met alone)."""
    return (facts.deadline_s - now - facts.remaining_s) / max(facts.total_s, 1e-9)


POLICIES = ("fcfs", "edf", "lrs", "srpt", "preflow", "lars")


def make_policy(name: str) -> OrderingPolicy:
    """Return the policy of that name, or of the class at that path. Raises ConfigError with the names that exist."""
    if is_dotted(name):
        return _own_policy(name)
    # Imported here: the policies import this module.
    from headway.policy.iteration import edf, fcfs, lars, lrs, preflow, srpt

    known: dict[str, OrderingPolicy] = {
        policy.name: policy
        for policy in (
            fcfs.FcfsPolicy(),
            edf.EdfPolicy(),
            lrs.LrsPolicy(),
            srpt.SrptPolicy(),
            preflow.PreflowPolicy(),
            lars.LarsPolicy(),
        )
    }
    if name not in known:
        raise ConfigError(f"unknown scheduling policy {name!r}: choose one of {', '.join(POLICIES)}")
    return known[name]


def _own_policy(path: str) -> OrderingPolicy:
    """Return a policy of the class at a dotted path. Raises ConfigError for one that is no ordering policy."""
    kind = load_dotted(path, "scheduling policy")
    if not (isinstance(kind, type) and callable(getattr(kind, "line", None)) and hasattr(kind, "parallel")):
        raise ConfigError(
            f"scheduling policy {path!r} must be a class with `name`, `parallel` and `line(facts)` "
            "(headway.policy.iteration.ordering.OrderingPolicy)"
        )
    policy: OrderingPolicy = kind()
    return policy
