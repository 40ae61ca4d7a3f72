"""Arrival processes: Poisson, gamma (burstier or smoother than Poisson), constant interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import ConfigError

Times = NDArray[np.float64]


class ArrivalProcess(Protocol):
    """An arrival process. Called once per workload, with the caller's generator."""

    def times(self, rng: np.random.Generator, count: int) -> Times:
        """Return `count` arrival times in seconds from the workload's start, ascending; the first is at 0."""


def _from_gaps(gaps: Times) -> Times:
    times = np.cumsum(gaps)
    return times - times[0] if times.size else times


@dataclass(frozen=True)
class PoissonArrivals:
    """Independent arrivals at a mean rate (requests per second)."""

    rate_rps: float

    def times(self, rng: np.random.Generator, count: int) -> Times:
        """See Arrivals."""
        return _from_gaps(rng.exponential(1 / self.rate_rps, count))


@dataclass(frozen=True)
class GammaArrivals:
    """Gamma-distributed gaps with a coefficient of variation: 1 is Poisson, above it arrivals come in bursts."""

    rate_rps: float
    cv: float

    def times(self, rng: np.random.Generator, count: int) -> Times:
        """See Arrivals."""
        # a gamma law of shape k has the coefficient of variation 1/√k and the mean k · scale
        shape = 1 / self.cv**2
        return _from_gaps(rng.gamma(shape, 1 / (self.rate_rps * shape), count))


@dataclass(frozen=True)
class ConstantArrivals:
    """One arrival every 1 / rate seconds."""

    rate_rps: float

    def times(self, rng: np.random.Generator, count: int) -> Times:
        """See Arrivals."""
        return np.arange(count, dtype=np.float64) / self.rate_rps


def arrivals(kind: str, rate_rps: float, cv: float = 1.0) -> ArrivalProcess:
    """Return an arrival process by name: poisson, gamma, constant. Raises ConfigError on bad arguments."""
    if not 0 < rate_rps < float("inf"):
        raise ConfigError(f"the arrival rate is {rate_rps}; it must be above 0 requests per second")
    if not 0 < cv < float("inf"):
        raise ConfigError(f"the arrivals' coefficient of variation is {cv}; it must be above 0")
    if kind == "poisson":
        return PoissonArrivals(rate_rps)
    if kind == "gamma":
        return GammaArrivals(rate_rps, cv)
    if kind == "constant":
        return ConstantArrivals(rate_rps)
    raise ConfigError(f"unknown arrivals {kind!r}; known are poisson, gamma, constant")
