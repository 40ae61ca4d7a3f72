"""Many simulations: the order of results, what is simulated once, and progress."""

from __future__ import annotations

import os

import pytest

from headway.sim.sweep import run_in_processes
from headway_research.base import SimulationCache


def process_and_square(number: int) -> tuple[int, int]:
    return os.getpid(), number * number


def fails_at_three(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_tasks(jobs: int) -> None:
    found = list(run_in_processes(process_and_square, range(6), jobs))
    assert [square for _, square in found] == [0, 1, 4, 9, 16, 25]
    assert (os.getpid() in {process for process, _ in found}) == (jobs == 1)


def test_a_point_is_simulated_once_and_progress_counts_the_missing_ones() -> None:
    cache: SimulationCache[int, int] = SimulationCache()
    simulated: list[int] = []
    progress: list[tuple[int, int]] = []

    def run(point: int) -> int:
        simulated.append(point)
        return -point

    cache.ensure([1, 2, 2], run)
    cache.ensure([2, 3, 1, 4], run, on_progress=lambda done, total: progress.append((done, total)))
    assert simulated == [1, 2, 3, 4]
    assert progress == [(1, 2), (2, 2)]
    assert [cache[point] for point in (1, 2, 3, 4)] == [-1, -2, -3, -4]
    cache.clear()
    assert 1 not in cache


def test_results_before_a_failing_point_are_kept() -> None:
    cache: SimulationCache[int, int] = SimulationCache()
    with pytest.raises(ValueError, match="three"):
        cache.ensure([1, 2, 3, 4], fails_at_three)
    assert 2 in cache
    assert 4 not in cache
