"""How tokens are written short: whatever they are, they come back."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.kv.slot_ranges import cut_ranges, slot_ranges_of, slots_of
from headway.runtime.kv_transfer.body_notes import KvBody, decode, encode, lengthen, packets, shorten
from headway.runtime.sequence_parallel.tokens import spread

tokens = st.lists(st.integers(0, 80), max_size=60).map(lambda found: np.array(found, dtype=np.int64))


@settings(max_examples=200, derandomize=True, deadline=None)
@given(tokens, st.booleans(), st.integers(1, 20))
def test_progressions_expand_to_the_same_numbers(numbers: np.ndarray, ordered: bool, most: int) -> None:
    if ordered:
        numbers = np.unique(numbers)
    assert np.array_equal(lengthen(shorten(numbers)), numbers)
    cut = list(packets(numbers, most))
    assert all(chosen.stop - chosen.start <= most for chosen, _ in cut)
    assert all(np.array_equal(lengthen(short), numbers[chosen]) for chosen, short in cut)
    assert sum(chosen.stop - chosen.start for chosen, _ in cut) == len(numbers)
    assert sum(count for _, count in slot_ranges_of(numbers)) == len(numbers)
    found = [np.arange(first, first + count) for first, count in slot_ranges_of(numbers)]
    assert np.array_equal(np.concatenate([np.empty(0, dtype=np.int64), *found]), numbers)


def test_orders_of_a_ring_are_few_progressions() -> None:
    for order in ("zigzag", "striped", "contiguous"):
        for share in spread(100, 4096, 4, order):  # type: ignore[arg-type]
            assert len(shorten(share)) <= 2


def test_a_note_with_the_maximum_of_progressions_is_small() -> None:
    rng = np.random.default_rng(0)
    scattered = np.cumsum(rng.integers(1, 100, 30_000)) + 2_000_000
    for _, short in packets(scattered, 10_000):
        note = KvBody(1 << 40, 127, (0, 128), short)
        assert len(encode(note)) < 60_000
        assert decode(encode(note)) == note


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
