"""What the last full run of each experiment gave, and why the rows that failed did: `recorded.json`, `causes.yaml`.

`scripts/record_reproductions.py` writes the first from the JSON of `headway reproduce`; the second is written by hand.
The list of `headway reproduce` and docs/reference/not-reproduced.md come from both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from headway.core.errors import ConfigError
from headway.core.strict_yaml import read_yaml
from headway_research.base import MODES, UNDECIDED, Mode
from headway_research.verdicts import MISSED, ONE_MODE

RECORDED = Path(__file__).with_name("recorded.json")
CAUSES = Path(__file__).with_name("causes.yaml")
FIRST_SEED = "first seed only"
"""What the note of a row says that rests on one seed in an experiment of several."""

Cause = Literal["ours", "paper", "setting", "unknown"]
CAUSES_IN_WORDS: dict[Cause, str] = {
    "ours": "a model, an approximation or a ruling of ours",
    "paper": "the paper contradicts itself, or its number is one of an implementation that it compares with",
    "setting": "the paper does not say what the number depends on",
    "unknown": "not found yet",
}


@dataclass(frozen=True)
class FailingRow:
    """A claim that was not reproduced."""

    claim: str
    paper: str
    """The paper's value."""
    found: str
    """What was found, and what was expected."""
    one_seed: bool
    """Whether it rests on simulations with a single seed, whose spread is not known."""
    longs: str = ""
    """How many long requests its runs had, "2 to 14", where a figure is a mean over them."""


@dataclass(frozen=True)
class OneModeRow:
    """A claim that one of the two modes meets: neither held nor failed."""

    claim: str
    paper: str
    """The paper's value."""
    mode: Mode
    """The mode that meets it."""
    paper_mode: str
    default_mode: str


@dataclass(frozen=True)
class UndecidedRow:
    """A claim whose runs had too few long requests for a verdict."""

    claim: str
    longs: str
    """How many, "2 to 4 long requests"."""


@dataclass(frozen=True)
class RecordedRun:
    """One experiment's last full run."""

    seeds: tuple[int, ...]
    """Empty where nothing is drawn."""
    rows: int
    failing: tuple[FailingRow, ...]
    one_mode: tuple[OneModeRow, ...]
    undecided: tuple[UndecidedRow, ...] = ()

    def verdict(self) -> str:
        """Return how many rows hold, in a few words."""
        held = self.rows - len(self.failing) - len(self.one_mode) - len(self.undecided)
        words = f"all {held} hold" if held == self.rows else f"{held} of {self.rows} hold"
        if self.one_mode:
            words += f", {len(self.one_mode)} in one mode only"
        if self.undecided:
            words += f", {len(self.undecided)} undecided"
        return f"{words}, one seed" if len(self.seeds) == 1 else words


@dataclass(frozen=True)
class RecordedCause:
    """Why rows failed."""

    cause: Cause
    reason: str
    ids: tuple[str, ...]
    claims: tuple[str, ...]


@cache
def recorded() -> dict[str, RecordedRun]:
    """Return the recorded runs by experiment; an experiment that was not run in full is absent."""
    data = msgspec.json.decode(RECORDED.read_bytes())
    return {
        name: RecordedRun(
            tuple(run["seeds"]),
            run["rows"],
            tuple(FailingRow(**row) for row in run["failing"]),
            tuple(OneModeRow(**row) for row in run["one_mode"]),
            tuple(UndecidedRow(**row) for row in run.get("undecided", ())),
        )
        for name, run in data.items()
    }


@cache
def causes() -> tuple[RecordedCause, ...]:
    """Return the causes in the order of their file. Raises ConfigError for one that is not of `Cause`."""
    found = []
    for entry in read_yaml(str(CAUSES))["causes"]:
        if entry["cause"] not in get_args(Cause):
            raise ConfigError(f"{CAUSES.name}: no cause {entry['cause']!r}: choose of {', '.join(get_args(Cause))}")
        found.append(RecordedCause(entry["cause"], entry["reason"], tuple(entry["ids"]), tuple(entry["claims"])))
    return tuple(found)


def cause_of(name: str, claim: str) -> RecordedCause | None:
    """Return why a row of an experiment failed, where that is written down."""
    return next((each for each in causes() if name in each.ids and claim in each.claims), None)


def to_record(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of an experiment's JSON."""
    seeds, failing, one_mode, undecided = list(data["source"]["seeds"]), [], [], []
    modes = {verdict: mode for mode, verdict in ONE_MODE.items()}
    for row in data["rows"]:
        if row["verdict"] in modes:
            ours = {f"{mode}_mode": _text(row["ours"][f"{mode}_mode"]) for mode in MODES}
            one_mode.append({"claim": row["claim"], "paper": _text(row["paper"]), "mode": modes[row["verdict"]]} | ours)
        if row["verdict"].startswith(UNDECIDED):
            undecided.append({"claim": row["claim"], "longs": row["verdict"].removeprefix(UNDECIDED)})
        if row["verdict"].startswith(MISSED):
            one_seed = len(seeds) == 1 or FIRST_SEED in row["why"].lower()
            found = row["verdict"].removeprefix(MISSED)
            kept = {"claim": row["claim"], "paper": _text(row["paper"]), "found": found, "one_seed": one_seed}
            failing.append(kept | _long_requests(data["source"], row["claim"]))
    kept_run = {"seeds": seeds, "rows": len(data["rows"]), "failing": failing, "one_mode": one_mode}
    return kept_run | ({"undecided": undecided} if undecided else {})


def _long_requests(source: Mapping[str, Any], claim: str) -> dict[str, str]:
    """Return how many long requests the runs behind a row had, where its regime, or its model, has that counted."""
    regimes: Mapping[str, Mapping[str, Sequence[int]]] = source.get("long_requests", {})
    of_claim = [counts for regime, counts in regimes.items() if claim.startswith(f"{regime}: ")] or list(
        regimes.values()
    )
    counts = [count for models in of_claim for found in models.values() for count in found]
    if not counts:
        return {}
    return {"longs": f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])}


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_text, value))
    return str(value)
