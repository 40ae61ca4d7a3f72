"""Slots as runs, (first slot, count) in the order of a request's tokens: which ones some of the tokens lie in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def cut_runs(runs: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The slots of tokens begin..end of a request, as runs; adjacent runs are joined."""
    cut: list[tuple[int, int]] = []
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
    """Runs of which the slots of some tokens are asked again and again."""

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        firsts = np.array([first for first, _ in runs], dtype=np.int64)
        counts = np.array([count for _, count in runs], dtype=np.int64)
        self._ends = np.cumsum(counts)
        self._shifts = firsts - (self._ends - counts)

    def of(self, tokens: Indices) -> Indices:
        """The slot of each of these tokens, all of which the runs hold."""
        run = np.searchsorted(self._ends, tokens, side="right")
        return np.asarray(self._shifts[run] + tokens, dtype=np.int64)


def slots_of(runs: Sequence[tuple[int, int]], tokens: Indices) -> Indices:
    """The slot of each of these tokens, all of which the runs hold."""
    return SlotRanges(runs).of(tokens)


def runs_of(numbers: Indices) -> list[tuple[int, int]]:
    """Numbers as runs of neighbours, in order."""
    if not len(numbers):
        return []
    edges = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(numbers)]
    return [(int(numbers[start]), end - start) for start, end in zip(starts, ends, strict=True)]
