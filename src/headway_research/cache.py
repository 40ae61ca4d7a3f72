"""Results of simulations that several figures share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from headway.sim.sweep import run_in_processes

Point = TypeVar("Point", bound=Hashable)
Result = TypeVar("Result")


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
