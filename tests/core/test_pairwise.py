"""The tests' own choice of cases."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.marks import pairwise


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_each_value_meets_each_value_of_every_other_axis_in_few_cases(sizes: list[int]) -> None:
    cases = pairwise(*(range(size) for size in sizes))
    for i, j in combinations(range(len(sizes)), 2):
        assert {(case[i], case[j]) for case in cases} == {(a, b) for a in range(sizes[i]) for b in range(sizes[j])}
    first, second = sorted(sizes)[-2:]
    assert first * second <= len(cases) <= 2 * first * second
