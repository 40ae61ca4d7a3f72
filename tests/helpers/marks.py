"""Which cases of a parametrized test run in `make test`; the others are long."""

from __future__ import annotations

from collections.abc import Sequence
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


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=LONG)
