"""Slots of a request's tokens, from runs of slots: (first slot, count) in the order of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def cut_ranges(runs: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return the slots of tokens [begin, end) of a request, as runs; adjacent runs are joined."""
    cut: list[tuple[int, int]] = []
    # Index of the request's token in the first slot of the current run.
    token = 0
    for first, count in runs:
        low, high = max(begin, token), min(end, token + count)
        if low < high:
            slot = first + low - token
            if cut and sum(cut[-1]) == slot:
                cut[-1] = (cut[-1][0], cut[-1][1] + high - low)
            else:
                cut.append((slot, high - low))
        token += count
        if token >= end:
            break
    return cut


class SlotRanges:
    """Index over runs for repeated look-ups of slots. O(log runs) a token."""

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        firsts = np.array([first for first, _ in runs], dtype=np.int64)
        counts = np.array([count for _, count in runs], dtype=np.int64)
        self._ends = np.cumsum(counts)
        # Slot = token + shift of its run: the run's first slot less its first token.
        self._shifts = firsts - (self._ends - counts)

    def of(self, tokens: Indices) -> Indices:
        """Return the slot of each token, int64 of the same shape. All tokens must be within the runs."""
        # "right": a token equal to an end belongs to the next run.
        run = np.searchsorted(self._ends, tokens, side="right")
        return np.asarray(self._shifts[run] + tokens, dtype=np.int64)


def slots_of(runs: Sequence[tuple[int, int]], tokens: Indices) -> Indices:
    """Return the slot of each token; one look-up of `SlotRanges`."""
    return SlotRanges(runs).of(tokens)


def slot_ranges_of(numbers: Indices) -> list[tuple[int, int]]:
    """Return ascending numbers as runs (first, count) of consecutive ones."""
    if not len(numbers):
        return []
    # Indices at which a new run begins.
    edges = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(numbers)]
    return [(int(numbers[start]), end - start) for start, end in zip(starts, ends, strict=True)]
