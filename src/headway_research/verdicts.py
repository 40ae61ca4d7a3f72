"""Verdicts on claims, by rules that are fixed before the numbers are known.

Verdicts: `exact`, `within band`, `ordering holds`, `illustrative` (the rule holds, but on a labelled approximation) and
`not reproduced: …`. A rule is applied to what paper mode and default mode give. Where only one of them meets it none of
these is granted: the verdict is `in paper mode only` or `in default mode only`, which counts neither as held nor as
failed. A figure that no machine reaches fails in either. Rows of regimes with fewer than 30 long requests come out of a
report as `undecided: …` (`base.undecided`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from headway_research.base import MODES, UNDECIDED, ClaimRow, Mode, plain

Kind = Literal["exact", "within band", "ordering holds"]
HELD = ("exact", "within band", "ordering holds", "illustrative")
ONE_MODE: dict[Mode, str] = {mode: f"in {mode} mode only" for mode in MODES}
MISSED = "not reproduced: "


def allowed(verdict: str) -> bool:
    """Return whether a text is one of the verdicts."""
    with_reason = any(verdict.startswith(start) and verdict != start for start in (MISSED, UNDECIDED))
    return with_reason or verdict in (*HELD, *ONE_MODE.values())


@dataclass(frozen=True)
class VerdictRule:
    """A rule for one claim. Missing values (None) never meet it."""

    kind: Kind
    """The verdict when the rule holds."""
    words: str
    """The rule in words, for the row's `why`."""
    test: Callable[[Any], bool]
    """Returns whether a value meets the rule."""
    limit: float = math.inf
    """Greatest value that is possible; a greater one in any mode fails the claim."""

    def __call__(self, value: Any) -> bool:
        return value is not None and bool(self.test(value))


def exact(value: Any, tolerance: float = 1e-9) -> VerdictRule:
    """Return a rule for this value, numbers (also in mappings) within an absolute tolerance."""

    def same(found: Any, wanted: Any) -> bool:
        if isinstance(wanted, Mapping):
            return set(found) == set(wanted) and all(same(found[key], wanted[key]) for key in wanted)
        if isinstance(wanted, str):
            return bool(found == wanted)
        return abs(float(found) - float(wanted)) <= tolerance

    return VerdictRule("exact", f"equal to {_show(value)}" + (f" ± {tolerance:g}" if tolerance > 1e-6 else ""),
                 lambda found: same(found, value))  # fmt: skip


def band(low: float, high: float) -> VerdictRule:
    """Return a rule for values from low to high, both included."""
    words = f"{low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"
    if low == -math.inf:
        words = f"at most {high:g}"
    return VerdictRule("within band", words, lambda value: low <= float(value) <= high)


def share_of_peak(low: float, high: float = 1.0) -> VerdictRule:
    """Return a rule for a utilisation from low to high; more than 1 is impossible."""
    return replace(band(low, high), limit=1.0)


def at_least(low: float) -> VerdictRule:
    """One-sided."""
    return band(low, math.inf)


def at_most(high: float) -> VerdictRule:
    """One-sided."""
    return band(-math.inf, high)


def order(words: str, test: Callable[[Any], bool]) -> VerdictRule:
    """Return a rule for an ordering or a trend, given in words and as a test."""
    return VerdictRule("ordering holds", words, test)


def ascending(words: str) -> VerdictRule:
    """Return a rule: the values of a mapping rise, in its order."""
    return order(words, lambda found: _sorted(list(found.values())))


def descending(words: str) -> VerdictRule:
    """Return a rule: the values of a mapping fall, in its order."""
    return order(words, lambda found: _sorted([-value for value in found.values()]))


def judge(
    claim: str,
    paper: Any,
    check: VerdictRule,
    ours: Mapping[Mode, Any],
    note: str = "",
    *,
    approximate: bool = False,
) -> ClaimRow:
    """Return the row of a claim. The verdict and `why` say which modes the rule holds in.

    ours: the value in each mode. approximate: the value rests on an approximation, so the verdict is at most
    `illustrative`.
    """
    held = [mode for mode in MODES if check(ours[mode])]
    impossible = [mode for mode in MODES if check.limit < math.inf and (ours[mode] or 0.0) > check.limit]
    if impossible:
        found = f"{_found({mode: ours[mode] for mode in impossible})}, more than the possible {check.limit:g}"
        verdict, why = f"{MISSED}{found}", f"expected {check.words}"
    elif held:
        verdict = "illustrative" if approximate else check.kind
        # a mode without a value does not count as one where the rule fails
        if None in ours.values():
            where = "in the only mode that applies"
        elif len(held) == 2:
            where = "in both modes"
        else:
            verdict = where = ONE_MODE[held[0]]
        why = f"{check.words}: holds {where}"
    else:
        verdict, why = f"{MISSED}{_found(ours)}, not {check.words}", f"expected {check.words}"
    return ClaimRow(
        claim=claim,
        paper=paper,
        paper_mode=ours["paper"],
        default_mode=ours["default"],
        verdict=verdict,
        why=f"{why}. {note}" if note else why,
    )


def judge_same(
    claim: str, paper: Any, check: VerdictRule, value: Any, note: str = "", *, approximate: bool = False
) -> ClaimRow:
    """Return the row of a claim whose value is the same in both modes."""
    return judge(claim, paper, check, {"paper": value, "default": value}, note, approximate=approximate)


def both(value: Callable[[Mode], Any]) -> dict[Mode, Any]:
    """Return the value of a function in each mode."""
    return {mode: value(mode) for mode in MODES}


def _sorted(values: list[float]) -> bool:
    """Return whether two or more values rise; a single value shows no order."""
    # equal up to rounding counts as in order
    return len(values) > 1 and all(a <= b + 1e-9 * abs(b) for a, b in pairwise(values))


def _found(ours: Mapping[Mode, Any]) -> str:
    shown = {mode: _show(ours[mode]) for mode in MODES if ours.get(mode) is not None}
    if len(shown) == 2 and len(set(shown.values())) == 1:
        return f"{shown['paper']} in both modes"
    return " and ".join(f"{value} in {mode} mode" for mode, value in shown.items()) or "no value"


def _show(value: Any) -> str:
    value = plain(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_show(item)}" for key, item in value.items()) or "no value"
    return str(value)
