"""The result of Tetris's planners: a prompt cut into chunks, each on a group of instances."""

from __future__ import annotations

from typing import NamedTuple


class ChunkPlan(NamedTuple):
    """One chunk of a prompt."""

    tokens: int
    group: tuple[int, ...]
    """Positions, in the planner's pool, of the instances that compute it, ascending."""


class ChunkAllocation(NamedTuple):
    """A prompt's chunks, in order."""

    chunks: tuple[ChunkPlan, ...]
    ttft_s: float
    """Estimated seconds from the decision to the first token."""
