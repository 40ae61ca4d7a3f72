"""A batch in flight of a simulated engine."""

from __future__ import annotations

from headway.core.batch import Batch
from headway.sim.decode_cohorts import DecodeCohort


class RunningBatch:
    """A batch in flight, standing for one iteration or for several with the same decodes."""

    __slots__ = ("batch", "cohorts", "elapsed_s", "end_s", "interrupted", "repeats")

    def __init__(self, batch: Batch, cohorts: list[DecodeCohort], end_s: float, elapsed_s: float, repeats: int) -> None:
        self.batch = batch
        self.cohorts = cohorts
        """The decode cohort of each part of the batch."""
        self.end_s = end_s
        """Virtual seconds at which the last iteration leaves the last stage."""
        self.elapsed_s = elapsed_s
        """Seconds of the first iteration on one stage, of an interrupted chunk also those before; reported to
        schedulers that correct their predictions."""
        self.interrupted = False
        """Whether it stops at `end_s` between two layers."""
        self.repeats = repeats
        """Iterations of the same decodes that the batch stands for."""
