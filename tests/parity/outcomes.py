"""What a case of the parity machine comes to, and the counts over many cases."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Outcome:
    """One comparison. `kind`: the property that was drawn; `words`: the refusal, or where the two sides differ."""

    result: Literal["equal", "refused", "alone", "differs"]
    """alone: this project reads what the reference cannot load."""
    kind: str
    words: str = ""


def reason(words: str) -> str:
    """Return a refusal without paths, names and numbers, so that equal reasons are counted together."""
    words = re.sub(r"\S*/(?=[\w.]+)", "", words)
    return re.sub(r"-?\d[\d.e+-]*", "N", words)[:650]


def run(case: Callable[[int], Outcome], seeds: Iterable[int]) -> list[tuple[int, Outcome]]:
    """Run a case for each seed."""
    return [(seed, case(seed)) for seed in seeds]


def report(outcomes: Iterable[tuple[str, int, Outcome]]) -> str:
    """Return counts by kind, refusals by reason, and every difference with its seed."""
    listed = list(outcomes)
    lines = []
    for kind in sorted({outcome.kind for _, _, outcome in listed}):
        counts = Counter(outcome.result for _, _, outcome in listed if outcome.kind == kind)
        lines.append(f"{kind:34} " + "  ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    for result, title in (("refused", "refused, by reason"), ("alone", "read here, refused by the reference")):
        lines.append(f"\n{title}:")
        reasons = Counter(reason(one.words) for _, _, one in listed if one.result == result)
        lines.extend(f"{count:6} {words}" for words, count in reasons.most_common())
    lines.append("\ndifferences:")
    lines.extend(f"{what} {seed}: {one.kind}: {one.words}" for what, seed, one in listed if one.result == "differs")
    total = Counter(outcome.result for _, _, outcome in listed)
    lines.append(f"\n{len(listed)} cases: " + ", ".join(f"{count} {name}" for name, count in sorted(total.items())))
    return "\n".join(lines)
