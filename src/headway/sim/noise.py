"""Noise of iteration times: a seeded factor between the simulated and the predicted time of each iteration."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headway.perf.latency.serving_overhead import TimeSpread, spread_at


@dataclass(frozen=True)
class NoiseSpec:
    """The law of the noise: an iteration takes predicted × bias × a random factor of mean 1."""

    kind: Literal["none", "lognormal", "uniform"] = "none"
    amount: float = 0.0
    """lognormal: standard deviation of ln(factor). uniform: the factor lies in [1 - amount, 1 + amount]."""
    bias: float = 1.0
    """Constant factor on every iteration; above 1, iterations take longer than predicted."""
    measured: bool = True
    """Whether iterations vary as those did that a table was measured with (`ServingOverhead.spread`)."""


class NoiseSource:
    """The sequence of factors of one replica, one for each iteration."""

    def __init__(self, noise: NoiseSpec, seed: str, spread: Sequence[TimeSpread] = ()) -> None:
        """spread: of the table that predicts iterations, drawn from in addition to `noise`."""
        self._noise = noise
        self._seed = seed
        self._random = random.Random(seed)
        self._kept: float | None = None
        self._spread = spread if noise.measured else ()
        self.exact = noise.bias == 1.0 and (noise.kind == "none" or noise.amount == 0.0) and not self._spread

    def fork(self, name: str) -> NoiseSource:
        """Return an independent source, seeded by this source's seed and `name`."""
        return NoiseSource(self._noise, f"{self._seed} {name}", self._spread)

    def factor(self, predicted_s: float) -> float:
        """Return the factor of the next iteration. predicted_s: its time without noise."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
        if self._spread:
            return self._drawn() * spread_at(self._spread, predicted_s).at(self._random.random())
        return self._drawn()

    def _drawn(self) -> float:
        noise = self._noise
        if noise.kind == "lognormal":
            # E[exp(N(-σ²/2, σ))] = 1, so the mean stays `bias`
            return noise.bias * math.exp(self._random.gauss(-0.5 * noise.amount**2, noise.amount))
        if noise.kind == "uniform":
            return noise.bias * self._random.uniform(1.0 - noise.amount, 1.0 + noise.amount)
        return noise.bias

    def keep(self, factor: float) -> None:
        """Put back a factor whose iteration was not started; the next call of `factor` returns it."""
        self._kept = factor
