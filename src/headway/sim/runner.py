"""Execution of many simulations: in parallel processes, each distinct one once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Generic, TypeVar

Task = TypeVar("Task")
Point = TypeVar("Point", bound=Hashable)
Result = TypeVar("Result")


def run_in_processes(run: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    """Yield `run(task)` for each task, in order, computed by `jobs` processes (1: in this one, lazily).

    Results do not depend on `jobs`. `run`, tasks and results must be picklable when `jobs` is above 1.
    """
    if min(jobs, len(tasks)) <= 1:
        # lazy and in this process: no start-up cost, and errors keep their traceback
        yield from map(run, tasks)
        return
    # spawn: a child that inherits nothing gives the same bytes whatever its parent had imported or opened
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
        yield from pool.map(run, tasks)


class SimulationCache(Generic[Point, Result]):
    """Results of simulations by point: everything that determines a result, as a hashable value.

    One cache for each kind of point serves all figures of a process, so that `reproduce all` simulates a point once.
    """

    def __init__(self) -> None:
        self._results: dict[Point, Result] = {}

    def ensure(
        self,
        points: Iterable[Point],
        run: Callable[[Point], Result],
        jobs: int = 1,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Simulate the points that have no result yet. on_progress: called after each with (done, total)."""
        # distinct, in order: results arrive in the order of the tasks
        missing = [point for point in dict.fromkeys(points) if point not in self._results]
        for done, (point, result) in enumerate(zip(missing, run_in_processes(run, missing, jobs), strict=True), 1):
            self._results[point] = result
            on_progress(done, len(missing))

    def __contains__(self, point: Point) -> bool:
        return point in self._results

    def __getitem__(self, point: Point) -> Result:
        return self._results[point]

    def clear(self) -> None:
        """Forget all results."""
        self._results.clear()
