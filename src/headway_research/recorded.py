"""What the last full run of each experiment gave, and why the rows that failed did: `recorded.json`, `causes.yaml`.

`scripts/record_reproductions.py` writes the first; the second is written by hand. The list and the pages of `headway
reproduce` and docs/reference/not-reproduced.md come from both.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from headway.core.errors import ConfigError
from headway.core.strict_yaml import read_yaml
from headway_research.base import KINDS, as_words
from headway_research.verdicts import HELD, MISSED

RECORDED = Path(__file__).with_name("recorded.json")
CAUSES = Path(__file__).with_name("causes.yaml")
FIRST_SEED = "first seed only"
"""What the note of a row says that rests on one seed in an experiment of several."""
NO_PAPER = "no paper has it"
"""What a row may say in place of a paper's value: it is counted apart, as rows are that say None."""

Cause = Literal["ours", "paper", "setting", "unknown"]
CAUSES_IN_WORDS: dict[Cause, str] = {
    "ours": "a model, an approximation or a ruling of ours",
    "paper": "the paper contradicts itself: a row of arithmetic proves it",
    "setting": "the paper does not say what the number depends on: a row shows the range that it spans",
    "unknown": "not found yet",
}


class RecordedRow(msgspec.Struct, frozen=True, array_like=True):
    """One row of an experiment's last full run. Values are texts."""

    claim: str
    paper: str | None
    """The paper's value; None: a row of no paper."""
    kind: str
    """A `base.Kind`."""
    verdict: str
    paper_mode: str | None
    default_mode: str | None
    one_seed: bool = False
    """It rests on simulations with a single seed, whose spread is not known."""

    @property
    def state(self) -> Literal["holds", "fails", "one mode"]:
        if self.verdict in HELD:
            return "holds"
        return "fails" if self.verdict.startswith(MISSED) else "one mode"

    @property
    def found(self) -> str:
        """What was found, in a few words: of both modes where they differ."""
        shown = [text for text in (self.paper_mode, self.default_mode) if text is not None]
        return shown[0] if len(set(shown)) == 1 else " / ".join(shown) or "not kept"


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment's last full run."""

    seeds: tuple[int, ...]
    """Empty where nothing is drawn."""
    cpu_s: float
    """Seconds of one core that the run took, without what it shared with earlier ones."""
    quick: str
    """Digest of the quick run's rows (`digest`), of the code that the full run was of; empty: not kept of this run."""
    rows: tuple[RecordedRow, ...]

    def verdict(self) -> str:
        """Return how many rows hold, in a few words."""
        own = [row for row in self.rows if row.paper is None]
        states = Counter(row.state for row in self.rows if row.paper is not None)
        count = len(self.rows) - len(own)
        words = f"{states['holds']} of {count}" if count else ""
        if states["one mode"]:
            words += f", {states['one mode']} in one mode"
        if own:
            held = sum(row.state == "holds" for row in own)
            words += f"{', ' if words else ''}own {held} of {len(own)}"
        return words


@dataclass(frozen=True)
class RecordedCause:
    """Why rows failed."""

    cause: Cause
    reason: str
    ids: tuple[str, ...]
    claims: tuple[str, ...]
    shown: tuple[str, str] | None
    """(id, claim) of the row that proves it (cause `paper`) or spans the range (cause `setting`)."""


@cache
def recorded() -> dict[str, RecordedRun]:
    """Return the recorded runs by experiment; an experiment that was not run in full is absent."""
    return msgspec.json.decode(RECORDED.read_bytes(), type=dict[str, RecordedRun])


@cache
def causes() -> tuple[RecordedCause, ...]:
    """Return the causes in the order of their file. Raises ConfigError for one that is not of `Cause`."""
    found = []
    for entry in read_yaml(str(CAUSES))["causes"]:
        if entry["cause"] not in get_args(Cause):
            raise ConfigError(f"{CAUSES.name}: no cause {entry['cause']!r}: choose of {', '.join(get_args(Cause))}")
        name, colon, claim = entry.get("shown", "").partition(": ")
        found.append(
            RecordedCause(
                entry["cause"],
                entry["reason"],
                tuple(entry["ids"]),
                tuple(entry["claims"]),
                (name, claim) if colon else None,
            )
        )
    return tuple(found)


def cause_of(name: str, claim: str) -> RecordedCause | None:
    """Return why a row of an experiment failed, where that is written down. A claim that ends in … is a beginning."""
    return next((each for each in causes() if name in each.ids and any(names(c, claim) for c in each.claims)), None)


def names(written: str, claim: str) -> bool:
    """Return whether a text of the causes names a claim: the claim itself, or its beginning, its end, or its middle.

    `…` stands for what is left out."""
    start, _, end = written.partition("…")
    return claim == written if "…" not in written else claim.startswith(start) and claim.endswith(end)


def totals(ids: Iterable[str]) -> Counter[tuple[str, str]]:
    """Return the rows of experiments by (state, kind); (`own`, state) counts those of no paper.

    A claim that several figures repeat counts once."""
    rows = {(row.claim, row.paper): row for name in ids if name in recorded() for row in recorded()[name].rows}
    return Counter((row.state, row.kind) if row.paper is not None else ("own", row.state) for row in rows.values())


def in_words(counts: Counter[tuple[str, str]]) -> str:
    """Return totals as two lines."""
    by_state = {state: sum(counts[state, kind] for kind in KINDS) for state in ("holds", "fails", "one mode")}
    kinds = ", ".join(f"{counts['holds', kind]} {kind}" for kind in KINDS)
    own = sum(count for (state, _), count in counts.items() if state == "own")
    return (
        f"{sum(by_state.values())} claims, each once: {by_state['holds']} hold ({kinds}), {by_state['one mode']} in one"
        f" mode only, {by_state['fails']} fail.\nRows of no paper: {counts['own', 'holds']} of {own} hold."
    )


def to_record(data: Mapping[str, Any], quick: Mapping[str, Any], cpu_s: float) -> RecordedRun:
    """Return what is kept of an experiment's JSON, and of its quick run's."""
    seeds = tuple(data["source"]["seeds"])

    def kept(value: Any) -> str | None:
        return None if value is None else as_words(value)

    rows = tuple(
        RecordedRow(
            row["claim"],
            None if row["paper"] in (None, NO_PAPER) else as_words(row["paper"]),
            row["kind"],
            row["verdict"],
            kept(row["ours"]["paper_mode"]),
            kept(row["ours"]["default_mode"]),
            len(seeds) == 1 or FIRST_SEED in row["why"].lower(),
        )
        for row in data["rows"]
    )
    return RecordedRun(seeds=seeds, cpu_s=cpu_s, quick=digest(quick), rows=rows)


def digest(data: Mapping[str, Any]) -> str:
    """Return a short digest of a report's claims and values."""
    kept = [[row["claim"], row["ours"], row["verdict"]] for row in data["rows"]]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def write(runs: Mapping[str, RecordedRun], file: Path = RECORDED) -> None:
    """Write the record, one row a line."""
    parts = []
    for name, run in runs.items():
        lines = ",\n  ".join(msgspec.json.encode(row).decode() for row in run.rows)
        head = f'"seeds": {list(run.seeds)}, "cpu_s": {run.cpu_s:g}, "quick": "{run.quick}"'
        parts.append(f' "{name}": {{{head}, "rows": [\n  {lines}]}}')
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n")
