"""When a batch leaves each pipeline stage. Stages take equally long; activations cross a link between two of them.

A stage begins a batch as soon as it is free and the batch has arrived; the sender does not wait for the receiver
(buffers are taken to suffice: batches in flight never outnumber stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageLink:
    """From stage to stage: seconds a message, and seconds a row of activations."""

    latency_s: float = 0.0
    row_s: float = 0.0


class StagePipeline:
    """`stages` stages, one after another."""

    def __init__(self, stages: int, link: StageLink) -> None:
        self._free_s = [0.0] * stages
        self._link = link

    @property
    def free_s(self) -> float:
        """When stage 0 is, or was, free for another batch."""
        return self._free_s[0]

    def enter(self, now: float, stage_s: float, rows: int) -> list[tuple[float, float]]:
        """A batch enters stage 0 at `now` (not before it is free). (start, end) seconds of each stage."""
        free = self._free_s
        if len(free) == 1:
            free[0] = now + stage_s
            return [(now, free[0])]
        cross_s = self._link.latency_s + rows * self._link.row_s
        spans = []
        at = now
        for stage, free_s in enumerate(free):
            start = max(at, free_s)
            end = start + stage_s
            free[stage] = end
            spans.append((start, end))
            at = end + cross_s
        return spans

    def lockstep(
        self, others: Sequence[StagePipeline], now: float, stage_s: float, rows: int
    ) -> list[tuple[float, float]]:
        """A batch that enters these pipelines and this one together: each stage begins when it is free in all."""
        all_free = [self._free_s, *(other._free_s for other in others)]
        cross_s = self._link.latency_s + rows * self._link.row_s
        spans = []
        at = now
        for stage in range(len(self._free_s)):
            start = max(at, *(free[stage] for free in all_free))
            end = start + stage_s
            for free in all_free:
                free[stage] = end
            spans.append((start, end))
            at = end + cross_s
        return spans

    def end_s(self, now: float, stage_s: float, rows: int) -> float:
        """When a batch that enters now would leave the last stage, were all stages free."""
        cross_s = self._link.latency_s + rows * self._link.row_s
        end = now + stage_s
        for _ in self._free_s[1:]:
            end = end + cross_s + stage_s
        return end

    def cut(self, end_s: float) -> None:
        """What is in the only stage ends sooner than was said."""
        self._free_s[0] = end_s

    def reset(self, now: float) -> None:
        """Whatever was in the stages is lost."""
        self._free_s = [now] * len(self._free_s)
