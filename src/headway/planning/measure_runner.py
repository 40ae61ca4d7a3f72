"""Simulation of candidates in parallel processes, each job once; results of an earlier run count as done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headway.planning.simulate import CandidateMeasure, MeasureKey, SimulationJob, measure
from headway.sim.runner import WorkerProcesses


class MeasureRunner:
    """A context manager: its processes start with the first job and end with the `with` block."""

    def __init__(
        self,
        jobs: int = 1,
        on_measure: Callable[[SimulationJob, CandidateMeasure], None] = lambda job, one: None,
        known: Mapping[MeasureKey, CandidateMeasure] | None = None,
    ) -> None:
        """jobs: processes; 1: this one. `on_measure` is called after each simulation. known: results of earlier runs of
        the same question (`answer.read_measures`)."""
        self._workers = WorkerProcesses(jobs)
        self._on_measure = on_measure
        self._known = dict(known or {})

    def __enter__(self) -> MeasureRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.__exit__()

    def measure(self, jobs: Sequence[SimulationJob]) -> list[CandidateMeasure]:
        """Simulate what is not known yet; return the measures in the order of the jobs, whatever the processes."""
        missing = [job for job in jobs if job.key not in self._known]
        for job, one in zip(missing, self._workers.map(measure, missing), strict=True):
            self._known[job.key] = one
            self._on_measure(job, one)
        return [self._known[job.key] for job in jobs]
