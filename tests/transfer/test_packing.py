"""Copies between a pool's slots and a body: whichever way is taken, they are what numpy's indexing makes of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.kv.allocator import Indices, slot_ranges_of
from headway.runtime.kv_transfer.connector import Bytes, by_runs, gather, scatter, spread

SLOTS = 200


@st.composite
def chosen(draw: st.DrawFn) -> Indices:
    """Slots in any order, each once: single ones, and runs of any length, long ones among them."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(lengths))))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    starts = np.cumsum([0, *(length + gap for length, gap in zip(lengths, gaps, strict=True))])
    parts = [np.arange(starts[i], starts[i] + lengths[i]) for i in order]
    slots = np.concatenate(parts)
    return slots[slots < SLOTS].astype(np.int64)


def pool(heads: int, vector: int, seed: int, rows: slice) -> Bytes:
    """Some heads of a layer, as a view of more of them."""
    return np.random.default_rng(seed).integers(0, 255, (2, heads + 2, SLOTS, vector), dtype=np.uint8)[:, rows]


shapes = st.tuples(st.integers(1, 3), st.sampled_from([1, 4, 6, 8, 16, 24]), st.integers(0, 9))


@given(shapes, chosen())
def test_a_gathered_body_is_the_slots_in_their_order(shape: tuple[int, int, int], slots: Indices) -> None:
    heads, vector, seed = shape
    source = pool(heads, vector, seed, slice(1, 1 + heads))
    before, body = source.copy(), np.zeros(2 * heads * len(slots) * vector, dtype=np.uint8)
    gather(source, slots, body)
    assert np.array_equal(body.reshape(2, heads, len(slots), vector), source[:, :, slots])
    assert np.array_equal(source, before)


@given(shapes, chosen())
def test_a_body_that_is_spread_or_scattered_is_in_its_slots_and_nowhere_else(
    shape: tuple[int, int, int], slots: Indices
) -> None:
    heads, vector, seed = shape
    body = np.random.default_rng(seed + 1).integers(0, 255, 2 * heads * len(slots) * vector, dtype=np.uint8)
    whole = pool(heads, vector, seed, slice(0, heads + 2))
    wanted = whole.copy()
    wanted[:, 1 : 1 + heads, slots] = body.reshape(2, heads, len(slots), vector)
    for way in ("spread", "scatter"):
        into = whole.copy()
        if way == "spread":
            spread(body, into[:, 1 : 1 + heads], slot_ranges_of(slots))
        else:
            scatter(body, into[:, 1 : 1 + heads], slots)
        assert np.array_equal(into, wanted), way


def test_many_slots_in_few_runs_are_copied_run_by_run() -> None:
    long, single = np.arange(64), np.arange(0, 128, 2)
    assert by_runs(64, len(slot_ranges_of(long)))
    assert not by_runs(64, len(slot_ranges_of(single)))
