"""Verdicts on claims, by rules that are fixed before the numbers are known.

A rule has one of four kinds: `exact` (an equal number), `two-sided` (a band around the paper's number), `one-sided` (a
bound) and `trend` (an order, no size). Verdicts: `holds`, `illustrative` (holds, but on a labelled approximation) and
`not reproduced: …`. A rule is applied to what paper mode and default mode give. Where only one of them meets it the
verdict is `in paper mode only` or `in default mode only`, which counts neither as held nor as failed. A figure that no
machine reaches fails in either. A rule that no value could miss is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from headway.core.errors import InvariantError
from headway_research.base import MODES, ClaimRow, Kind, Mode, as_words

HOLDS, ILLUSTRATIVE = "holds", "illustrative"
HELD = (HOLDS, ILLUSTRATIVE)
ONE_MODE: dict[Mode, str] = {mode: f"in {mode} mode only" for mode in MODES}
MISSED = "not reproduced: "


def allowed(verdict: str) -> bool:
    """Return whether a text is one of the verdicts."""
    return (verdict.startswith(MISSED) and verdict != MISSED) or verdict in (*HELD, *ONE_MODE.values())


@dataclass(frozen=True)
class VerdictRule:
    """A rule for one claim. Missing values (None) never meet it."""

    kind: Kind
    words: str
    """The rule in words, for the row's `why`."""
    test: Callable[[Any], bool]
    """Returns whether a value meets the rule."""
    limit: float = math.inf
    """Greatest value that is possible; a greater one in any mode fails the claim."""

    def __call__(self, value: Any) -> bool:
        return value is not None and bool(self.test(value))

    def can_miss(self, value: Any) -> bool:
        """Return whether a value of this form can miss the rule: of another size, in another order, or incomplete."""
        # a bound on each value is missed where one is missing: that shows nothing about the bound
        partial = _incomplete(value) if self.kind == "trend" else ()
        return any(self._misses(other) for other in (*_others(value), *partial))

    def _misses(self, value: Any) -> bool:
        try:
            return not self(value)
        except TypeError:
            # a rule that compares a missing value is not tried with it
            return False


def exact(value: Any, tolerance: float = 1e-9) -> VerdictRule:
    """Return a rule for this value, numbers (also in mappings) within an absolute tolerance."""

    def same(found: Any, wanted: Any) -> bool:
        if isinstance(wanted, Mapping):
            return set(found) == set(wanted) and all(same(found[key], wanted[key]) for key in wanted)
        if isinstance(wanted, str):
            return bool(found == wanted)
        return abs(float(found) - float(wanted)) <= tolerance

    return VerdictRule("exact", f"equal to {as_words(value)}" + (f" ± {tolerance:g}" if tolerance > 1e-6 else ""),
                 lambda found: same(found, value))  # fmt: skip


def band(low: float, high: float) -> VerdictRule:
    """Return a rule for values from low to high, both included. An infinite end makes it one-sided."""
    words = f"{low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"
    if low == -math.inf:
        words = f"at most {high:g}"
    kind: Kind = "two-sided" if math.isfinite(low) and math.isfinite(high) else "one-sided"
    return VerdictRule(kind, words, lambda value: low <= float(value) <= high)


def share_of_peak(low: float, high: float = 1.0) -> VerdictRule:
    """Return a rule for a utilisation from low to high; more than 1 is impossible."""
    return replace(band(low, high), limit=1.0)


def at_least(low: float) -> VerdictRule:
    """One-sided."""
    return band(low, math.inf)


def at_most(high: float) -> VerdictRule:
    """One-sided."""
    return band(-math.inf, high)


def every(check: VerdictRule, of: str = "model") -> VerdictRule:
    """Return a rule for a mapping: it has values, and each meets `check`. of: what its keys name."""
    return replace(
        check,
        words=f"{check.words} for every {of}",
        test=lambda found: bool(found) and all(check(value) for value in found.values()),
    )


def order(words: str, test: Callable[[Any], bool]) -> VerdictRule:
    """Return a rule for an ordering or a trend, given in words and as a test."""
    return VerdictRule("trend", words, test)


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
    ours: Mapping[Mode, Any] | Callable[[Mode], Any],
    note: str = "",
    *,
    approximate: bool = False,
) -> ClaimRow:
    """Return the row of a claim. The verdict and `why` say which modes the rule holds in.

    paper: None for a check of our own. ours: the value in each mode, or its function of a mode. approximate: the value
    rests on an approximation, so the verdict is at most `illustrative`. Raises InvariantError for a rule that these
    values cannot miss.
    """
    ours = both(ours) if callable(ours) else ours
    for value in ours.values():
        if value and not check.can_miss(value):
            raise InvariantError(f"no value can miss the rule of {claim!r}: {check.words}")
    held = [mode for mode in MODES if check(ours[mode])]
    impossible = [mode for mode in MODES if check.limit < math.inf and (ours[mode] or 0.0) > check.limit]
    if impossible:
        found = f"{_found({mode: ours[mode] for mode in impossible})}, more than the possible {check.limit:g}"
        verdict, why = f"{MISSED}{found}", f"expected {check.words}"
    elif held:
        verdict = ILLUSTRATIVE if approximate else HOLDS
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
        kind=check.kind,
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


def only(mode: Mode, value: Any) -> dict[Mode, Any]:
    """Return a value that belongs to one mode alone."""
    return {each: value if each == mode else None for each in MODES}


def _others(value: Any) -> Iterator[Any]:
    """Yield values of the same form: of other sizes, and mappings also in reverse and with one value changed."""
    if isinstance(value, str):
        yield "no such answer"
    elif isinstance(value, Mapping):
        keys, values = list(value), list(value.values())
        yield dict(zip(keys, reversed(values), strict=True))
        changed = [list(_others(each)) for each in values]
        for number in range(max(map(len, changed), default=0)):
            yield {k: other[min(number, len(other) - 1)] for k, other in zip(keys, changed, strict=True)}
            for at, key in enumerate(keys):
                yield {**value, key: changed[at][min(number, len(changed[at]) - 1)]}
    elif isinstance(value, list | tuple):
        for number in range(3):
            yield [list(_others(each))[number] for each in value]
    elif value is not None:
        size = float(value)
        # a size that is never negative is not tried below zero: no rule may rest on that
        yield from (0.0, size / 1000, size * 1000 + 1000, *((1000.0,) if size < 0 else ()))


def _incomplete(value: Any) -> Iterator[Any]:
    """Yield a mapping with each of its values missing in turn."""
    if isinstance(value, Mapping):
        yield from ({**value, key: None} for key in value)


def _sorted(values: list[float]) -> bool:
    """Return whether two or more values rise; a single value shows no order."""
    # equal up to rounding counts as in order
    return len(values) > 1 and all(a <= b + 1e-9 * abs(b) for a, b in pairwise(values))


def _found(ours: Mapping[Mode, Any]) -> str:
    shown = {mode: as_words(ours[mode]) for mode in MODES if ours.get(mode) is not None}
    if len(shown) == 2 and len(set(shown.values())) == 1:
        return f"{shown['paper']} in both modes"
    return " and ".join(f"{value} in {mode} mode" for mode, value in shown.items()) or "no value"
