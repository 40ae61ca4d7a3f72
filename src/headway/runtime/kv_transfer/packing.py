"""Between a pool's slots and a message's body, (2, heads, tokens, vector) without gaps: copies that let other threads
run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.kv.slot_ranges import Indices, slot_ranges_of
from headway.runtime.kv_transfer.connector import Bytes

_FEW = 16
"""Slots a run below which one indexed copy beats a copy for each run."""

_WIDE = 8


def by_runs(slots: int, runs: int) -> bool:
    """Whether to copy contiguous ranges one by one (few ranges) rather than gather by index."""
    return slots >= _FEW * runs


def gather(heads: Bytes, slots: Indices, into: Bytes) -> None:
    """Slots of (2, heads, slots, vector), in any order, into a body."""
    source, body = _wide(heads), _wide(into.reshape(*heads.shape[:2], len(slots), heads.shape[-1]))
    runs = slot_ranges_of(slots)
    if by_runs(len(slots), len(runs)):
        at = 0
        for first, count in runs:
            body[:, :, at : at + count] = source[:, :, first : first + count]
            at += count
        return
    # mode="clip" lets numpy write straight into `out`: the default mode buffers it. All slots are in range.
    for plane, head in np.ndindex(*heads.shape[:2]):
        np.take(source[plane, head], slots, axis=0, out=body[plane, head], mode="clip")


def spread(body: Bytes, heads: Bytes, runs: Sequence[tuple[int, int]]) -> None:
    """A body into runs of slots, (first, count) in the order of its tokens."""
    source, target = _wide(body.reshape(*heads.shape[:2], -1, heads.shape[-1])), _wide(heads)
    at = 0
    for first, count in runs:
        target[:, :, first : first + count] = source[:, :, at : at + count]
        at += count


def scatter(body: Bytes, heads: Bytes, slots: Indices) -> None:
    """A body into slots in any order."""
    source, target = _wide(body.reshape(*heads.shape[:2], len(slots), heads.shape[-1])), _wide(heads)
    for plane, head in np.ndindex(*heads.shape[:2]):
        target[plane, head][slots] = source[plane, head]


def _wide(vectors: Bytes) -> npt.NDArray[Any]:
    """The same in words, which are copied faster than bytes."""
    return vectors.view(np.uint64) if vectors.shape[-1] % _WIDE == 0 else vectors
