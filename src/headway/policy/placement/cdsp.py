"""Tetris's planner (CDSP, Algorithms 1-3): cuts a prompt into chunks on growing groups, in Python or by a compiled
search that returns the same plans.

Four observations make it fast. Eq. (2) is an absolute time line: a chunk starts at the later of the previous chunk's
end and its group's latest free time, so pools are never copied. On a node, groups are always the first so many by free
time, so a group is a count a node. Eq. (1) is solved in closed form. And no completion beats what is left at the
fastest size, so most pairs need not be tried. The search is in C++ where a compiler is at hand, else in Python.
"""

from __future__ import annotations

import ctypes
import functools
import math
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from headway.core.errors import ConfigError
from headway.core.native_build import LIBRARIES, compiled
from headway.perf.latency.eq1 import Eq1Coefficients, Eq1Latency


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


Counts = tuple[int, ...]
"""A group as the number of instances of each node, in order of when they are free."""


class SpSize(NamedTuple):
    """A candidate size of a sequence-parallel group."""

    sp: int
    coefficients: Eq1Coefficients
    """Eq. (1) for this size."""
    smaller: Eq1Coefficients | None
    """Eq. (1) for the next smaller candidate."""


class CdspPlanner:
    """Plans for one pool of instances. Not thread-safe."""

    def __init__(
        self, latency: Eq1Latency, sizes: Sequence[int], node_of: Sequence[int], *, native: bool | None = None
    ) -> None:
        """node_of: node of each instance. native: use the compiled search; None: if it can be built; True: ConfigError
        if it cannot. Raises ConfigError for sizes without Eq. (1) coefficients."""
        given = sorted(s for s in set(sizes) if s <= len(node_of))
        unknown = [s for s in given if s not in latency.sizes]
        if unknown or not given:
            raise ConfigError(
                f"Eq. (1) has SP sizes {list(latency.sizes)}, and {unknown or 'none of them'} were asked for"
            )
        found = [latency.sizes[s] for s in given]
        self.sizes = tuple(
            SpSize(s, at, before) for s, at, before in zip(given, found, [None, *found[:-1]], strict=True)
        )
        # larger sizes have larger constants and smaller slopes: then a lower bound of the rest is valid for all splits
        self._prune = all(
            x.a >= 0 and x.b >= y.b and x.c >= y.c and x.d >= y.d and y.c >= 2 * y.d * (1 - 1e-12)
            for x, y in pairwise(found)
        ) and found[0].c >= 2 * found[0].d * (1 - 1e-12)
        nodes: dict[int, list[int]] = {}
        for i, node in enumerate(node_of):
            nodes.setdefault(node, []).append(i)
        self._members = [ids for _, ids in sorted(nodes.items())]
        self._native: NativeSearch | None = None
        if native is not False:
            self._native = native_search(self._members, [(s.sp, s.coefficients) for s in self.sizes], self._prune)
            if native and self._native is None:
                raise ConfigError("the compiled planner needs a C++ compiler")

    @property
    def is_native(self) -> bool:
        """Whether plans come from the compiled search."""
        return self._native is not None

    def plan(
        self, tokens: int, queue_s: Sequence[float], rate: float, cached: int = 0, *, single: bool = False
    ) -> ChunkAllocation:
        """Return the allocation of a new request of `tokens` uncached tokens. queue_s: seconds until each instance is
        free, at least 0. rate: the improvement that a larger size must bring. single: the single-chunk plan
        (Algorithm 2)."""
        if self._native is not None:
            return self._native.plan(tokens, queue_s, rate, cached, single)
        return _CdspSearch(self, queue_s, rate, single).plan(tokens, cached)


class _CdspSearch:
    """One request's search in Python."""

    def __init__(self, planner: CdspPlanner, queue_s: Sequence[float], rate: float, single: bool) -> None:
        self.sizes, self._prune = planner.sizes, planner._prune
        self._keep, self._chunks = 1.0 - rate, not single
        # stable sort: equal queues stay in order of id, as the literal planner breaks ties
        self._order = [sorted(ids, key=queue_s.__getitem__) for ids in planner._members]
        self._free = [[queue_s[i] for i in ids] for ids in self._order]
        self._one_node = len(self._free) == 1
        self._best_s = float("inf")
        self._best: tuple[tuple[int, Counts], ...] = ()

    def plan(self, tokens: int, cached: int) -> ChunkAllocation:
        pool = tuple(map(len, self._free))
        self._schedule(tokens, cached, 0.0, (0,) * len(pool), (), self.sizes, pool)
        return ChunkAllocation(
            tuple(
                ChunkPlan(n, tuple(sorted(i for ids, k in zip(self._order, counts, strict=True) for i in ids[:k])))
                for n, counts in self._best
            ),
            self._best_s,
        )

    def _schedule(
        self,
        left: int,
        past: int,
        now: float,
        initial: Counts,
        chunks: tuple[tuple[int, Counts], ...],
        sizes: Sequence[SpSize],
        pool: Counts,
    ) -> None:
        """Search Algorithm 1's plans that begin with `chunks`, which end at `now`; keep the best in `_best`."""
        # Algorithm 2: everything that is left as one chunk
        limit, group, most = float("inf"), initial, 0
        for k, (sp, eq1, _) in enumerate(sizes):
            counts, free_s = self._group(pool, initial, sp, now)
            wait_s = free_s - now if free_s > now else 0.0
            # Eq. (1): a + b * n + c * past * n + d * n^2 seconds for n tokens after `past` ones
            ttft_s = wait_s + eq1.a + left * (eq1.b + eq1.c * past + eq1.d * left)
            # a larger size must improve on the best so far by the rate
            if ttft_s < limit * self._keep:
                limit, group, most = ttft_s, counts, k
        if now + limit < self._best_s:
            self._best_s, self._best = now + limit, (*chunks, (left, group))
        # Algorithm 3: a chunk on a smaller group until more instances are free, then the rest
        for i in range(most if self._chunks else 0):
            sp, eq1, smaller = sizes[i]
            mine, mine_s = self._group(group, initial, sp, now)
            begin_s = max(now, mine_s)
            for j in range(i + 1, most + 1):
                other_s = self._group(group, mine, sizes[j].sp, now)[1]
                # seconds for tokens, after the chunk's constant, until the larger group is free
                rest_s = other_s - begin_s - eq1.a
                if rest_s <= 0.0:
                    continue
                linear = eq1.b + eq1.c * past
                root = linear + math.sqrt(linear * linear + 4.0 * eq1.d * rest_s)
                n = min(left, int(2.0 * rest_s / root)) if root > 0 else left  # Eq. (1) solved for tokens
                if n <= 0:
                    continue
                chunk_s = eq1.a + n * (eq1.b + eq1.c * past + eq1.d * n)
                # illegal: no faster than on the next smaller size
                if smaller is not None and chunk_s >= smaller.a + n * (smaller.b + smaller.c * past + smaller.d * n):
                    continue
                end_s = begin_s + chunk_s
                if n == left:
                    if end_s < self._best_s:
                        self._best_s, self._best = end_s, (*chunks, (n, mine))
                    continue
                # even at the fastest size and without waiting, the rest cannot beat the best plan
                if self._prune and end_s + self._least(past + n, left - n, sizes, j, most) >= self._best_s:
                    continue
                # the rest stays inside the single-chunk group, on sizes from the one waited for on
                self._schedule(left - n, past + n, end_s, mine, (*chunks, (n, mine)), sizes[j : most + 1], group)

    @staticmethod
    def _least(past: int, left: int, sizes: Sequence[SpSize], first: int, last: int) -> float:
        """Return a lower bound of the seconds for the rest: the fastest size, without waiting."""
        least = float("inf")
        for k in range(first, last + 1):
            eq1 = sizes[k].coefficients
            seconds = eq1.a + left * (eq1.b + eq1.c * past + eq1.d * left)
            if seconds < least:
                least = seconds
        return least

    def _group(self, pool: Counts, initial: Counts, size: int, now: float) -> tuple[Counts, float]:
        """GetGroup: return `initial` extended to `size` instances, and the time at which all are free."""
        free = self._free
        # inside one node a group is the first `size` instances by free time
        if self._one_node:
            return (size,), free[0][size - 1]
        counts = list(initial)
        need = size - sum(counts)
        held = [n for n, k in enumerate(initial) if k]
        while need > 0:  # inside held nodes, the shortest queue first
            best, at = now, -1
            for n in held:
                k = counts[n]
                if k < pool[n] and (at < 0 or max(free[n][k], now) < best):
                    best, at = max(free[n][k], now), n
            if at < 0:
                break
            counts[at] += 1
            need -= 1
        if need > 0:
            self._spread(pool, counts, need, now)
        # sorted by free time: the last instance taken of each node is its latest
        return tuple(counts), max([free[n][k - 1] for n, k in enumerate(counts) if k])

    def _spread(self, pool: Counts, counts: list[int], need: int, now: float) -> None:
        """Add `need` instances of nodes without any: whole nodes, then one for the rest, else the shortest queues of
        all."""
        free = self._free
        others = [n for n, k in enumerate(counts) if not k and pool[n]]
        whole = max(pool[n] for n in others)
        while need > whole:
            full = [n for n in others if pool[n] == whole]
            if not full:
                break
            node = min(full, key=lambda n: max(free[n][whole - 1], now))
            others.remove(node)
            counts[node] = whole
            need -= whole
        able = [n for n in others if pool[n] >= need]
        if able:
            counts[min(able, key=lambda n: max(free[n][need - 1], now))] = need
            return
        for _ in range(need):
            node = min((n for n in others if counts[n] < pool[n]), key=lambda n: max(free[n][counts[n]], now))
            counts[node] += 1
