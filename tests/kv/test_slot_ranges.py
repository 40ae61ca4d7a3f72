"""Runs of slots: those of some tokens, and how slots in any order are runs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.kv.allocator import cut_ranges, slot_ranges_of, slots_of


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 80), max_size=60), st.booleans())
def test_runs_are_the_slots_again(slots: list[int], ordered: bool) -> None:
    numbers = np.array(sorted(set(slots)) if ordered else slots, dtype=np.int64)
    found = [slot for first, count in slot_ranges_of(numbers) for slot in range(first, first + count)]
    assert found == numbers.tolist()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=6), st.data())
def test_slots_of_tokens_are_those_of_the_runs(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    runs, at = [], 0
    for gap, count in steps:
        runs.append((at + gap, count))
        at += gap + count
    total = sum(count for _, count in runs)
    begin = data.draw(st.integers(0, total))
    end = data.draw(st.integers(begin, total))
    expected = [slot for first, count in runs for slot in range(first, first + count)][begin:end]
    assert slots_of(runs, np.arange(begin, end)).tolist() == expected
    assert [slot for first, count in cut_ranges(runs, begin, end) for slot in range(first, first + count)] == expected
