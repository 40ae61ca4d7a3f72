"""Length distributions over token counts. Every sample is a whole number of at least one token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
_NORMAL = NormalDist()
Z90 = _NORMAL.inv_cdf(0.9)
MOST = 1e12
"""Upper bound of any length, tokens."""


class LengthDistribution(Protocol):
    """A distribution of lengths. Each sample takes a fixed number of draws, so that seeds stay comparable."""

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        """Return `count` independent lengths in tokens, each at least 1."""


def _whole(values: NDArray[np.float64]) -> Counts:
    return np.maximum(1, np.rint(values)).astype(np.int64)


@dataclass(frozen=True)
class FixedLengths:
    """A constant length."""

    tokens: int

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        """See Lengths."""
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class UniformLengths:
    """Every length from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        """See Lengths."""
        return rng.integers(self.low, self.high + 1, count)


@dataclass(frozen=True)
class LogNormalLengths:
    """ln X ~ Normal(mu, sigma), given that low ≤ X ≤ high (truncated, not clipped: no heap at the ends)."""

    mu: float
    sigma: float
    low: float = 1.0
    high: float = MOST

    @classmethod
    def of(cls, median: float, p90: float, low: float = 1.0, high: float = MOST) -> LogNormalLengths:
        """Return the law with this median and 90th percentile *before* truncation."""
        return cls(math.log(median), math.log(p90 / median) / Z90, low, high)

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        """See Lengths. One uniform a sample, through the inverse of the truncated law."""
        bottom, top = self._cdf(self.low), self._cdf(self.high)
        shares = bottom + (top - bottom) * rng.random(count)
        # the inverse is infinite at 0 and 1
        tiny = 1e-12
        z = np.array([_NORMAL.inv_cdf(min(max(share, tiny), 1 - tiny)) for share in shares.tolist()])
        return _whole(np.clip(np.exp(self.mu + self.sigma * z), self.low, self.high))

    def mass(self) -> float:
        """Return the share of the untruncated law that lies between low and high."""
        # all mass lies at exp(mu)
        if self.sigma == 0:
            return float(self.low <= math.exp(self.mu) <= self.high)
        return self._cdf(self.high) - self._cdf(self.low)

    def _cdf(self, value: float) -> float:
        if value <= 0:
            return 0.0
        if self.sigma == 0:
            return float(math.log(value) >= self.mu)
        return _NORMAL.cdf((math.log(value) - self.mu) / self.sigma)


@dataclass(frozen=True)
class QuantileLengths:
    """A law given by its quantiles, log-linear between them: the compact form of a measured distribution."""

    points: tuple[tuple[float, float], ...]
    """(share in 0 … 1, tokens), ascending, from share 0 to share 1."""

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        """See Lengths."""
        shares, tokens = zip(*self.points, strict=True)
        return _whole(np.exp(np.interp(rng.random(count), shares, np.log(tokens))))


@dataclass(frozen=True)
class EmpiricalLengths:
    """Measured lengths, drawn with replacement."""

    tokens: tuple[int, ...]

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        """See Lengths."""
        drawn: Counts = np.maximum(1, rng.choice(np.asarray(self.tokens, dtype=np.int64), count))
        return drawn


@dataclass(frozen=True)
class MixtureLengths:
    """Each sample from one of several laws, chosen by weight (weights need not sum to one)."""

    parts: tuple[tuple[float, LengthDistribution], ...]

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        """See Lengths."""
        weights = np.array([weight for weight, _ in self.parts])
        which = rng.choice(len(self.parts), count, p=weights / weights.sum())
        # every law draws `count` samples, used or not: the number of draws does not depend on the choice
        drawn = np.stack([law.sample(rng, count) for _, law in self.parts])
        chosen: Counts = drawn[which, np.arange(count)]
        return chosen
