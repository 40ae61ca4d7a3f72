"""Times at which a batch enters and leaves each pipeline stage.

All stages take equally long; activations cross a link between neighbours. A stage begins a batch as soon as it is free
and the batch has arrived; the sender does not wait for the receiver (buffers are taken to suffice: batches in flight
never outnumber stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageLink:
    """Time to send activations from one stage to the next."""

    latency_s: float = 0.0
    """Seconds for each message."""
    row_s: float = 0.0
    """Seconds for each row (token) of activations."""


class StagePipeline:
    """A pipeline of `stages` stages, with the time at which each becomes free."""

    def __init__(self, stages: int, link: StageLink) -> None:
        self._free_s = [0.0] * stages
        self._link = link

    @property
    def free_s(self) -> float:
        """Virtual seconds at which stage 0 is, or became, free for another batch."""
        return self._free_s[0]

    def enter(self, now: float, stage_s: float, rows: int) -> list[tuple[float, float]]:
        """Enter a batch of `rows` tokens at `now`, which must not be before stage 0 is free.

        Return (start, end) of each stage, virtual seconds.
        """
        free = self._free_s
        # fast path for the usual case: no link, no list to build up
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
        """Enter a batch into this pipeline and `others` at once: each stage begins when it is free in all of them.

        Return (start, end) of each stage, virtual seconds.
        """
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
        """Return the time at which a batch entering at `now` leaves the last stage, if all stages are free."""
        cross_s = self._link.latency_s + rows * self._link.row_s
        end = now + stage_s
        for _ in self._free_s[1:]:
            end = end + cross_s + stage_s
        return end

    def cut(self, end_s: float) -> None:
        """Free the only stage at `end_s`, earlier than `enter` returned, when repeated decodes are cut short."""
        self._free_s[0] = end_s

    def reset(self, now: float) -> None:
        """Drop the batches in all stages: every stage is free from `now` on."""
        self._free_s = [now] * len(self._free_s)
