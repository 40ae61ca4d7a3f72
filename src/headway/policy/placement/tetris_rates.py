"""Tetris's improvement rate by load: a table of (requests a second, rate), looked up every so often (§5.1, §7.1).

The table is made by simulating (`headway profile rates`, `headway_research.tetris.rates`) and handed down as data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from headway.core.errors import ConfigError
from headway.policy.placement.view import ClusterSnapshot

SCHEMA = "headway.tetris-rates/1"


class RateTable(msgspec.Struct, frozen=True, kw_only=True):
    """Improvement rates by load."""

    points: tuple[tuple[float, float], ...]
    """(load in requests a second, improvement rate), ascending."""
    source: str = ""
    """What was simulated to make it."""
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a table of improvement rates needs a point")
        for load, rate in self.points:
            if not (load >= 0 and 0 <= rate < 1):
                raise ValueError(f"({load}, {rate}) is not a load of at least 0 and a rate from 0 to 1")

    def at(self, load_rps: float) -> float:
        """Return the rate of the nearest recorded load; of two equally near, the lower one's."""
        return min(self.points, key=lambda point: (abs(point[0] - load_rps), point[0]))[1]


def load_rates(path: Path) -> RateTable:
    """Read a table from a file. Raises ConfigError, which names what is wrong."""
    try:
        table = msgspec.json.decode(path.read_bytes(), type=RateTable)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a table of improvement rates: {error}") from error
    if table.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {table.schema!r}, not {SCHEMA}")
    return table


@runtime_checkable
class LoadAwareRates(Protocol):
    """A policy that works with improvement rates by load: `tetris`."""

    def replace_rates(self, table: RateTable) -> None:
        """Use another table from the next decision on (Tetris §6)."""


class RateControl:
    """The improvement rate in force: looked up every `refresh_s` by the arrival rate of the last `window_s`."""

    def __init__(self, table: RateTable, window_s: float = 30.0, refresh_s: float = 30.0) -> None:
        self._table, self._window_s, self._refresh_s = table, window_s, refresh_s
        self._due_s = -float("inf")
        self._rate = 0.0

    def rate(self, view: ClusterSnapshot) -> float:
        """Return the rate for a decision now."""
        # between two look-ups the rate is constant: the load is a mean over many arrivals
        if view.now_s >= self._due_s:
            self._rate = self._table.at(view.arrival_rate_rps(self._window_s))
            self._due_s = view.now_s + self._refresh_s
        return self._rate

    def replace(self, table: RateTable) -> None:
        """Use another table from the next decision on, as when the length distribution has shifted."""
        self._table = table
        self._due_s = -float("inf")
