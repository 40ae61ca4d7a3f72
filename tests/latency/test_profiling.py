"""The grid that `headway profile` and a starting server measure, on a made-up machine."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from headway.perf.latency.table import TableLatency
from headway.policy.iteration.budget import EfficientChunks
from headway.runtime.executor.profiling import FULL, QUICK, MeasureFunction, ProfileGrid, profile

GRID = ProfileGrid((1, 64, 1024), (8, 128, 512), (0, 2048, 8192), ((1, 128), (4, 1024)), (1,), 3)
PAIR_S, ROW_S, FIXED_S = 1e-9, 1e-6, 1e-3


def true_s(kind: str, first: int, second: int) -> float:
    """A machine whose times are lines."""
    if kind == "decodes":
        return 1e-4 + first * (second + 1) * PAIR_S
    own = first * (first + 1) / 2 * PAIR_S
    return first * second * PAIR_S + own if kind == "chunk" else FIXED_S + first * ROW_S + own


def machine(visits: Counter[tuple[str, int, int]], disturbed: int = 0) -> MeasureFunction:
    """Takes no time. disturbed: on each point's so many first visits other load doubles its time."""

    def ask(kind: str, first: int, second: int, repeats: int) -> float:
        visits[kind, first, second] += 1
        return true_s(kind, first, second) * (2.0 if visits[kind, first, second] <= disturbed else 1.0)

    return ask


@pytest.mark.parametrize("disturbed", [0, 2])
def test_a_burst_of_other_load_does_not_stay_in_the_table(disturbed: int) -> None:
    visits: Counter[tuple[str, int, int]] = Counter()
    table = TableLatency(profile(machine(visits, disturbed), 100_000, GRID, 10.0, "f", "p"))
    assert set(visits.values()) == {GRID.repeats}
    for size, past in ((128, 0), (512, 2048), (512, 8192), (8, 8192)):
        assert table.attention_s(past, size) == pytest.approx(true_s("chunk", size, past), rel=0.1)
    assert table.rows_s(1024) == pytest.approx(FIXED_S + 1024 * ROW_S, rel=0.1)


def test_a_point_that_was_disturbed_each_time_is_lowered_to_one_of_more_work() -> None:
    def ask(kind: str, first: int, second: int, repeats: int) -> float:
        return true_s(kind, first, second) * (9.0 if (kind, first) in (("chunk", 128), ("forward", 64)) else 1.0)

    source = profile(ask, 100_000, GRID, 10.0, "f", "p")
    table = TableLatency(source)
    assert table.attention_s(2048, 128) <= true_s("chunk", 512, 2048)
    assert table.rows_s(64) <= true_s("forward", 1024, 0)


def test_a_chunk_that_was_disturbed_each_time_does_not_make_longer_iterations_look_worthwhile() -> None:
    def ask(kind: str, first: int, second: int, repeats: int) -> float:
        return true_s(kind, first, second) * (1.7 if (kind, first) == ("chunk", 128) else 1.0)

    chunks = EfficientChunks(TableLatency(profile(ask, 100_000, GRID, 10.0, "f", "p")), 8192)
    calm = EfficientChunks(TableLatency(profile(machine(Counter()), 100_000, GRID, 10.0, "f", "p")), 8192)
    assert chunks.aim_s(1 << 20, 0.8) == pytest.approx(calm.aim_s(1 << 20, 0.8))


def test_long_runs_over_deep_histories_are_left_out() -> None:
    visits: Counter[tuple[str, int, int]] = Counter()
    # 2% of it are 2 ms: a chunk of 512 over 2,048 takes 1.2, over 8,192 it would take 4.3.
    source = profile(machine(visits), 100_000, GRID, 0.1, "f", "p")
    assert visits["chunk", 512, 2048]
    assert not visits["chunk", 512, 8192]
    assert visits["chunk", 128, 8192]
    assert source.validated_past == 8192


def test_a_spent_budget_leaves_two_points_of_each_family() -> None:
    visits: Counter[tuple[str, int, int]] = Counter()

    def ask(kind: str, first: int, second: int, repeats: int) -> float:
        time.sleep(0.01)
        return machine(visits)(kind, first, second, repeats)

    table = TableLatency(profile(ask, 100_000, FULL, 0.01, "f", "p"))
    kinds = Counter(kind for kind, _, _ in visits)
    assert kinds == {"chunk": 4, "decodes": 2, "forward": 2}
    assert table.rows_s(512) > table.rows_s(1) > 0


def test_a_starting_server_measures_the_chunks_that_it_will_choose() -> None:
    """Chunks of 512 over a history, and passes of 1,024 rows: extrapolated from 128 and 256 they were 30% off."""
    visits: Counter[tuple[str, int, int]] = Counter()
    profile(machine(visits), 100_000, QUICK, 0.5, "f", "p")
    assert visits["chunk", 512, 2048]
    assert visits["chunk", 512, 8192]
    assert visits["forward", 1024, 0]
    assert not any(first + second > 100_000 for _, first, second in visits)
    few: Counter[tuple[str, int, int]] = Counter()
    profile(machine(few), 600, QUICK, 0.5, "f", "p")
    assert all(first + second <= 600 for kind, first, second in few if kind != "decodes")
