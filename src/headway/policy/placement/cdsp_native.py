"""The compiled search of `cdsp.CdspPlanner`, called through preallocated buffers: some microseconds a plan."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any

from headway.core.native_build import LIBRARIES, compiled
from headway.perf.latency.eq1 import Eq1Coefficients
from headway.policy.placement.cdsp_plan import ChunkAllocation, ChunkPlan

MOST_NODES, MOST_SIZES, MOST_CHUNKS, MOST_INSTANCES = 128, 12, 12, 8192
_POINTER, _INT, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double


@functools.cache
def _library() -> Any:
    library = compiled(LIBRARIES["cdsp"])
    if library is None:
        return None
    function = library.headway_cdsp_plan
    pool, state, out = (_INT, _POINTER, _POINTER), (_LONG, _LONG, _DOUBLE, _INT), (_POINTER,) * 4
    function.argtypes = (*pool, _INT, _POINTER, _INT, _POINTER, *state, *out)
    function.restype = _INT
    return function


class NativeSearch:
    """The compiled search with its buffers, for one pool. Not thread-safe."""

    def __init__(
        self, members: Sequence[Sequence[int]], sizes: Sequence[tuple[int, Eq1Coefficients]], prune: bool
    ) -> None:
        count = sum(map(len, members))
        starts = [0]
        for ids in members:
            starts.append(starts[-1] + len(ids))
        self._start = array("i", starts)
        self._ids = array("i", [i for node in members for i in node])
        # five numbers a size, as the C++ source reads them: sp and the coefficients of Eq. (1)
        self._sizes = array("d", [v for sp, at in sizes for v in (float(sp), at.a, at.b, at.c, at.d)])
        self._queue = array("d", [0.0] * count)
        self._ttft = array("d", [0.0])
        self._tokens = array("q", [0] * MOST_CHUNKS)
        self._group = array("i", [0] * MOST_CHUNKS)
        self._out = array("i", [0] * (MOST_CHUNKS * count))
        start, places, table, self._queue_at, ttft, tokens, group, out = (
            buffer.buffer_info()[0]
            for buffer in (
                self._start, self._ids, self._sizes, self._queue, self._ttft, self._tokens, self._group, self._out,
            )
        )  # fmt: skip
        # addresses are taken once: the arrays above must live as long as `self`, and never be resized
        self._head = (len(members), start, places, len(sizes), table, int(prune), self._queue_at)
        self._tail = (ttft, tokens, group, out)
        self._call = _library()

    def plan(self, tokens: int, queue_s: Sequence[float], rate: float, cached: int, single: bool) -> ChunkAllocation:
        """See `CdspPlanner.plan`."""
        # another length would resize the buffer, and may move it: checked below
        self._queue[:] = array("d", queue_s)
        if self._queue.buffer_info()[0] != self._queue_at:
            raise ValueError(f"{len(queue_s)} queues for a pool of another size")
        count = self._call(*self._head, tokens, cached, rate, single, *self._tail)
        chunks, at = [], 0
        for i in range(count):
            end = at + self._group[i]
            chunks.append(ChunkPlan(self._tokens[i], tuple(self._out[at:end])))
            at = end
        return ChunkAllocation(tuple(chunks), self._ttft[0])


def native_search(
    members: Sequence[Sequence[int]], sizes: Sequence[tuple[int, Eq1Coefficients]], prune: bool
) -> NativeSearch | None:
    """Return the compiled search; None if it cannot be built, or the pool exceeds its fixed limits."""
    fits = len(members) <= MOST_NODES and len(sizes) <= MOST_SIZES and sum(map(len, members)) <= MOST_INSTANCES
    return NativeSearch(members, sizes, prune) if fits and _library() is not None else None
