"""Where a span can be paused, in its own time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.request import cut
from headway.perf.latency.groups import PausePoints


def _square(start: int, end: int) -> float:
    return float(end * end - start * start) + 3.0


SPANS = st.tuples(
    st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 4), st.sampled_from([0, 1, 64, 512]), st.integers(1, 6)
)


@settings(max_examples=200)
@given(SPANS, st.floats(0.0, 1.0), st.floats(0.001, 50.0))
def test_next_point_is_the_first_pause_point_not_before_a_time(
    span: tuple[int, int, int, int, int], share: float, whole_s: float
) -> None:
    start, tokens, members, rows, layers = span
    points = PausePoints(cut(start, start + tokens, members, rows), _square, layers)
    known = [
        (points.elapsed_share(first, layer) * whole_s, first, layer)
        for first, _ in points.pieces
        for layer in range(layers)
    ]
    known.append((whole_s, points.pieces[-1][0], layers))
    assert known == sorted(known)
    at_s, first, layer = points.next_point(start, 0, share * whole_s, whole_s)
    wanted = next(point for point in known if point[0] >= share * whole_s - 1e-6 * whole_s)
    assert (first, layer) == wanted[1:] or abs(wanted[0] - share * whole_s) < 2e-6 * whole_s
    assert at_s == pytest.approx(points.elapsed_share(first, layer) * whole_s, abs=1e-9 * whole_s + 1e-12)
    widest = max(b[0] - a[0] for a, b in pairwise(known))
    assert points.widest_gap * whole_s == pytest.approx(widest)


@settings(max_examples=100)
@given(SPANS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_two_steps_reach_the_same_pause_point_as_one(
    span: tuple[int, int, int, int, int], one: float, two: float
) -> None:
    start, tokens, members, rows, layers = span
    points = PausePoints(cut(start, start + tokens, members, rows), _square, layers)
    one, two = sorted((one, two))
    at_s, first, layer = points.next_point(start, 0, one, 1.0)
    again_s, *there = points.next_point(first, layer, max(0.0, two - at_s), 1.0)
    assert at_s + again_s == pytest.approx(points.elapsed_share(*there), abs=1e-9)
    assert at_s + again_s >= two - 1e-6


def test_uncut_span_can_be_paused_after_each_layer() -> None:
    points = PausePoints(((0, 100),), lambda start, end: pytest.fail("nothing is to be predicted"), 4)
    assert points.next_point(0, 1, 0.3, 2.0) == (0.5, 0, 2)
    assert points.widest_gap == 0.25
    assert points.elapsed_share(0, 3) == 0.75


def test_token_inside_a_piece_is_an_error() -> None:
    points = PausePoints(cut(0, 4096, 1, 512), _square, 2)
    with pytest.raises(ValueError, match="begins at 100"):
        points.elapsed_share(100, 0)
    with pytest.raises(ValueError, match="begins at 5000"):
        points.next_point(5000, 0, 0.0, 1.0)
