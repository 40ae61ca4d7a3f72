"""Where a span can be paused, in its own time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.span import cut
from headway.perf.latency.pause_points import PausePoints


def _square(start: int, end: int) -> float:
    return float(end * end - start * start) + 3.0


SPANS = st.tuples(
    st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 4), st.sampled_from([0, 1, 64, 512]), st.integers(1, 6)
)


@settings(max_examples=200)
@given(SPANS, st.floats(0.0, 1.0), st.floats(0.001, 50.0))
def test_the_next_edge_is_the_first_one_that_is_not_before(
    span: tuple[int, int, int, int, int], share: float, whole_s: float
) -> None:
    start, tokens, members, rows, layers = span
    edges = PausePoints(cut(start, start + tokens, members, rows), _square, layers)
    known = [(edges.over(first, layer) * whole_s, first, layer) for first, _ in edges.pieces for layer in range(layers)]
    known.append((whole_s, edges.pieces[-1][0], layers))
    assert known == sorted(known)
    at_s, first, layer = edges.next(start, 0, share * whole_s, whole_s)
    wanted = next(edge for edge in known if edge[0] >= share * whole_s - 1e-6 * whole_s)
    assert (first, layer) == wanted[1:] or abs(wanted[0] - share * whole_s) < 2e-6 * whole_s
    assert at_s == pytest.approx(edges.over(first, layer) * whole_s, abs=1e-9 * whole_s + 1e-12)
    widest = max(b[0] - a[0] for a, b in pairwise(known))
    assert edges.widest * whole_s == pytest.approx(widest)


@settings(max_examples=100)
@given(SPANS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_pausing_on_the_way_leads_to_the_same_edges(
    span: tuple[int, int, int, int, int], one: float, two: float
) -> None:
    start, tokens, members, rows, layers = span
    edges = PausePoints(cut(start, start + tokens, members, rows), _square, layers)
    one, two = sorted((one, two))
    at_s, first, layer = edges.next(start, 0, one, 1.0)
    again_s, *there = edges.next(first, layer, max(0.0, two - at_s), 1.0)
    assert at_s + again_s == pytest.approx(edges.over(*there), abs=1e-9)
    assert at_s + again_s >= two - 1e-6


def test_a_span_that_is_not_cut_pauses_behind_each_layer() -> None:
    edges = PausePoints(((0, 100),), lambda start, end: pytest.fail("nothing is to be predicted"), 4)
    assert edges.next(0, 1, 0.3, 2.0) == (0.5, 0, 2)
    assert edges.widest == 0.25
    assert edges.over(0, 3) == 0.75


def test_what_is_no_piece_has_no_share() -> None:
    edges = PausePoints(cut(0, 4096, 1, 512), _square, 2)
    with pytest.raises(ValueError, match="begins at 100"):
        edges.over(100, 0)
    with pytest.raises(ValueError, match="begins at 5000"):
        edges.next(5000, 0, 0.0, 1.0)
