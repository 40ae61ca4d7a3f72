"""How far reality is from the prediction: a seeded factor for each iteration."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NoiseSpec:
    """An iteration takes predicted × bias × a random factor of mean 1.

    lognormal: ln of the factor has standard deviation `amount`. uniform: the factor lies in [1 - amount, 1 + amount].
    """

    kind: Literal["none", "lognormal", "uniform"] = "none"
    amount: float = 0.0
    bias: float = 1.0


class NoiseSource:
    """The factors of one replica, in order of its iterations."""

    def __init__(self, noise: NoiseSpec, seed: str) -> None:
        self._noise = noise
        self._seed = seed
        self._random = random.Random(seed)
        self._kept: float | None = None
        self.exact = noise.bias == 1.0 and (noise.kind == "none" or noise.amount == 0.0)

    def fork(self, name: str) -> NoiseSource:
        """Another source, whose factors are its own."""
        return NoiseSource(self._noise, f"{self._seed} {name}")

    def factor(self) -> float:
        """The next iteration's."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
        noise = self._noise
        if noise.kind == "lognormal":
            return noise.bias * math.exp(self._random.gauss(-0.5 * noise.amount**2, noise.amount))
        if noise.kind == "uniform":
            return noise.bias * self._random.uniform(1.0 - noise.amount, 1.0 + noise.amount)
        return noise.bias

    def keep(self, factor: float) -> None:
        """Take a factor back: the iteration that it was drawn for has not begun."""
        self._kept = factor
