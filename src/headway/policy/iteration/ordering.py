"""Orders of waiting prefills beside the ladder, each as a *line* in time.

urgency(now) = intercept - slope * now, and the smallest goes first. FCFS, EDF, LRS, SRPT and LARS are all lines, which
only change when a request's own progress does: no policy reads a clock, and one vector operation orders all requests.
The default, `ladder`, is no line: the place of a request depends on all others (`headway.policy.ladder`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from headway.core.errors import ConfigError
from headway.core.parse import is_dotted, load_dotted


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


class _LineOrder:
    """An order given by a function."""

    def __init__(self, name: str, parallel: bool, line: Callable[[PrefillFacts], UrgencyLine]) -> None:
        self.name = name
        self.parallel = parallel
        self.line = line


def _lars(facts: PrefillFacts) -> UrgencyLine:
    # rho = (deadline - remaining) / total - now / total. A fully cached prompt has no work: avoid division by 0.
    total = max(facts.total_s, 1e-9)
    return UrgencyLine((facts.deadline_s - facts.remaining_s) / total, 1.0 / total)


LADDER: Final = "ladder"
"""The default."""
_ORDERS: Final[dict[str, OrderingPolicy]] = {
    order.name: order
    for order in (
        _LineOrder("fcfs", True, lambda facts: UrgencyLine(facts.arrival_s, 0.0)),
        # Earliest deadline first: fine below saturation, a convoy once long prompts are late (Medha §4.1).
        _LineOrder("edf", True, lambda facts: UrgencyLine(facts.deadline_s, 0.0)),
        # Least remaining slack: a + d - t - w(t), whatever the length of the request (Medha §4.1).
        _LineOrder("lrs", True, lambda facts: UrgencyLine(facts.deadline_s - facts.remaining_s, 1.0)),
        # Shortest remaining prefill time first.
        _LineOrder("srpt", True, lambda facts: UrgencyLine(facts.remaining_s, 0.0)),
        # Length-aware relative slack (Medha §4.1), with its sign: late ones by how late they are for their size.
        _LineOrder("lars", False, _lars),
    )
}
POLICIES = (LADDER, *_ORDERS)


def make_policy(name: str) -> OrderingPolicy | None:
    """Return the policy of that name, or of the class at that path; None for the ladder.

    Raises ConfigError with the names that exist."""
    if is_dotted(name):
        return _own_policy(name)
    if name not in POLICIES:
        raise ConfigError(f"unknown scheduling policy {name!r}: choose one of {', '.join(POLICIES)}")
    return _ORDERS.get(name)


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
