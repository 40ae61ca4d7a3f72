"""Noise of iteration times: a seeded factor between the simulated and the predicted time of each iteration."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NoiseSpec:
    """The law of the noise: an iteration takes predicted × bias × a random factor of mean 1."""

    kind: Literal["none", "lognormal", "uniform"] = "none"
    amount: float = 0.0
    """lognormal: standard deviation of ln(factor). uniform: the factor lies in [1 - amount, 1 + amount]."""
    bias: float = 1.0
    """Constant factor on every iteration; above 1, iterations take longer than predicted."""


class NoiseSource:
    """The sequence of factors of one replica, one for each iteration."""

    def __init__(self, noise: NoiseSpec, seed: str) -> None:
        self._noise = noise
        self._seed = seed
        self._random = random.Random(seed)
        self._kept: float | None = None
        self.exact = noise.bias == 1.0 and (noise.kind == "none" or noise.amount == 0.0)

    def fork(self, name: str) -> NoiseSource:
        """Return an independent source, seeded by this source's seed and `name`."""
        return NoiseSource(self._noise, f"{self._seed} {name}")

    def factor(self) -> float:
        """Return the factor of the next iteration."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
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
