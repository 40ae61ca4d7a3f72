"""What docs/reference/policies.md says of the default, against the table it is about."""

from __future__ import annotations

import pytest
from benchmarks.policy_choice import TABLE, cells, comparison, default_is_best, default_row

TEXT = TABLE.read_text()
CELLS = cells(TEXT)


def test_the_page_has_the_comparison_of_its_own_table() -> None:
    assert TEXT.endswith(comparison(TEXT))


def test_the_default_is_the_best_in_time_where_most_prompts_are_short_and_the_page_says_where_it_is_not() -> None:
    best = {cell for cell, rows in CELLS.items() if default_is_best(rows)}
    assert len(CELLS) == 13
    assert len(best) == 9
    assert {workload for workload, _ in set(CELLS) - best} == {"mooncake conversation"}
    assert min(default_row(CELLS[cell]).in_time for cell in best) >= 99.9


@pytest.mark.parametrize("load", ["0.5", "0.8", "0.95", "1.1"])
def test_srpt_is_the_choice_where_most_prompts_are_long(load: str) -> None:
    rows = CELLS["mooncake conversation", load]
    srpt = next(row for row in rows if row.policy == "srpt, space shared")
    assert srpt.in_time >= 0.95 * max(row.in_time for row in rows)
    mine = default_row(rows)
    assert srpt.short[0] < mine.short[0]
    assert srpt.long[0] < mine.long[0]


def test_what_srpt_costs_past_saturation() -> None:
    rows = CELLS["chats and documents", "1.1"]
    srpt = next(row for row in rows if row.policy == "srpt, space shared")
    assert srpt.long[2] > 1.3 * default_row(rows).long[2]
