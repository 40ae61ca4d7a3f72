"""Which cases of a parametrized test there are, and which of them run in `make test`; the others are long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

LONG = pytest.mark.long


def quick_first(cases: Sequence[Any], quick: int = 1) -> list[Any]:
    """The first `quick` cases as they are, the others as long ones."""
    return [case if number < quick else _long(case) for number, case in enumerate(cases)]


def quick_diagonal(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """Pairs of all rows with all columns. Quick: as few as name each row and each column at least once."""
    longest = max(len(rows), len(columns))
    quick = {(number % len(rows), number % len(columns)) for number in range(longest)}
    return [
        pytest.param(row, column, marks=() if (i, j) in quick else LONG)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few cases in which each value of an axis meets each value of every other axis at least once.

    Most faults need two values that meet, not all of a product's (D. Kuhn et al., "Software fault interactions", 2004).
    """

    def pairs(case: Sequence[int]) -> set[tuple[int, int, int, int]]:
        return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}

    left = list(product(*(range(len(axis)) for axis in axes)))
    unmet = set().union(*map(pairs, left))
    chosen = []
    while unmet:
        best = max(left, key=lambda case: len(pairs(case) & unmet))
        unmet -= pairs(best)
        chosen.append(best)
    return [tuple(axis[index] for axis, index in zip(axes, case, strict=True)) for case in chosen]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=LONG)
