"""The default beside all other policies in docs/reference/policy-table.md."""

from __future__ import annotations

import pytest
from benchmarks.policy_table import TABLE, comparison, default_row, table_cells

TEXT = TABLE.read_text()
CELLS = table_cells(TEXT)


def test_the_page_has_the_comparison_of_its_own_table() -> None:
    assert TEXT.endswith(comparison(TEXT))


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_the_default_is_in_time_as_often_as_the_best_within_three_percent(cell: tuple[str, str]) -> None:
    rows = CELLS[cell]
    assert default_row(rows).in_time >= 0.97 * max(row.in_time for row in rows)
