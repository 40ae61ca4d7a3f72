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
    with WorkerProcesses(min(jobs, len(tasks))) as workers:
        yield from workers.map(run, tasks)


class WorkerProcesses:
    """Processes for several rounds of tasks, started with the first task and ended with the `with` block."""

    def __init__(self, jobs: int) -> None:
        """jobs: number of processes; at most 1: the caller's own."""
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def map(self, run: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """See `run_in_processes`."""
        if self._jobs <= 1 or not tasks:
            # lazy and in this process: no start-up cost, and errors keep their traceback
            return map(run, tasks)
        if self._pool is None:
            # spawn: a child that inherits nothing gives the same bytes whatever its parent had imported or opened
            self._pool = ProcessPoolExecutor(self._jobs, mp_context=multiprocessing.get_context("spawn"))
        return self._pool.map(run, tasks)


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
