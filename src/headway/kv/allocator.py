"""Allocator of KV blocks in contiguous ranges (*runs*), and the slots of a request's tokens in them.

Attention on CPU reads a contiguous run of KV in one call, whatever the block size, so the allocator keeps requests
contiguous: it extends a request's last run in place where it can, otherwise takes the smallest free run that holds all,
otherwise the largest ones. The same operations in the same order give the same blocks, so an executor replays them and
batches carry no block tables.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from headway.core.batch import KvOp
from headway.core.errors import InvariantError

Run = tuple[int, int]
"""(first block, number of blocks)."""


class BlockAllocator:
    """Allocator of blocks 0..n_blocks-1.

    Free ones are sorted, disjoint, non-adjacent runs; an operation is O(free runs)."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.free_blocks = n_blocks
        self._free: list[Run] = [(0, n_blocks)] if n_blocks else []

    def allocate(self, blocks: int, after: int | None = None) -> list[Run]:
        """Take `blocks` blocks and return them as runs in order. `after`: the request's last block, to be extended.

        Raises InvariantError when fewer are free: `BlockManager` checks `free_blocks` first.
        """
        if blocks > self.free_blocks or blocks < 0:
            raise InvariantError(f"{blocks} blocks asked of an allocator with {self.free_blocks} free")
        taken: list[Run] = []
        left = blocks
        if after is not None and left:
            i = bisect_left(self._free, (after + 1, 0))
            # Extend the last run in place as far as its free neighbour reaches.
            if i < len(self._free) and self._free[i][0] == after + 1:
                left -= self._take(i, left, taken)
        while left:
            left -= self._take(self._choose(left), left, taken)
        self.free_blocks -= blocks
        return taken

    def release(self, runs: list[Run]) -> None:
        """Free runs and merge them with free neighbours. Raises InvariantError on a block that is free already."""
        for first, count in runs:
            i = bisect_left(self._free, (first, 0))
            before = self._free[i - 1] if i else None
            behind = self._free[i] if i < len(self._free) else None
            if (before and before[0] + before[1] > first) or (behind and first + count > behind[0]):
                raise InvariantError(f"blocks {first}..{first + count - 1} are released twice")
            self.free_blocks += count
            # Entries low..high-1 of the free list are replaced by the merged run.
            low, high = i, i
            if before and before[0] + before[1] == first:
                low, first, count = i - 1, before[0], before[1] + count
            if behind and first + count == behind[0]:
                high, count = i + 1, count + behind[1]
            self._free[low:high] = [(first, count)]

    def has_run(self, blocks: int, at: int | None = None) -> bool:
        """Return whether so many free blocks lie side by side.

        `at`: the block behind a run that they are to extend: they must begin there, or leave room to go on."""
        return any(count >= blocks for first, count in self._free if at is None or first == at or count > blocks)

    def free_runs(self) -> tuple[Run, ...]:
        """Return the free runs, in order."""
        return tuple(self._free)

    def check(self) -> None:
        """Raise InvariantError unless free runs are sorted, disjoint, non-adjacent, in range and add up."""
        end = -1
        for first, count in self._free:
            # `<=`: runs that touch should have been merged. `end` starts below block 0.
            if first <= end or count <= 0:
                raise InvariantError(f"free runs overlap or touch at block {first}")
            end = first + count
        if end > self.n_blocks or sum(count for _, count in self._free) != self.free_blocks:
            raise InvariantError("free runs do not add up to the free count")

    def _choose(self, blocks: int) -> int:
        """Return the index of the smallest free run that holds all `blocks`, else of the largest; the first on ties."""
        if len(self._free) == 1:
            return 0
        counts = [count for _, count in self._free]
        best = min([count for count in counts if count >= blocks], default=0) or max(counts)
        return counts.index(best)

    def _take(self, i: int, blocks: int, taken: list[Run]) -> int:
        """Move up to `blocks` blocks from the front of free run `i` to `taken`. Return how many."""
        first, count = self._free[i]
        n = min(blocks, count)
        if n == count:
            del self._free[i]
        else:
            self._free[i] = (first + n, count - n)
        if taken and taken[-1][0] + taken[-1][1] == first:
            taken[-1] = (taken[-1][0], taken[-1][1] + n)
        else:
            taken.append((first, n))
        return n


class BlockTables:
    """Runs of blocks by request.

    `BlockManager` has one copy, and each executor one that replays the `KvOp`s of batches."""

    def __init__(self, n_blocks: int) -> None:
        self.allocator = BlockAllocator(n_blocks)
        self._runs: dict[str, list[Run]] = {}

    def apply(self, op: KvOp) -> None:
        """Carry out one operation of a `BlockManager`."""
        if op.verb == "free":
            self.free(op.request, op.runs)
        elif op.verb == "reassign":
            self.reassign(op.before, op.request)
        elif op.verb == "share":
            self.share(op.request, op.runs)
        elif op.verb == "evict":
            self.evict(op.runs)
        else:
            self.add(op.request, op.blocks)

    def add(self, request: str, blocks: int) -> None:
        """Reserve or grow: append `blocks` blocks to the request's runs."""
        runs = self._runs.setdefault(request, [])
        after = runs[-1][0] + runs[-1][1] - 1 if runs else None
        for first, count in self.allocator.allocate(blocks, after):
            if runs and runs[-1][0] + runs[-1][1] == first:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((first, count))

    def share(self, request: str, runs: Sequence[Run]) -> None:
        """Begin a request's table with cached blocks, which other tables may hold too.

        Raises InvariantError if the request has blocks."""
        if request in self._runs:
            raise InvariantError(f"request {request} has blocks already")
        self._runs[request] = list(runs)

    def free(self, request: str, kept: Sequence[Run] = ()) -> None:
        """Free all blocks of a request but those that stay cached. Raises InvariantError for an unknown request."""
        runs = self._runs.pop(request, None)
        if runs is None:
            raise InvariantError(f"request {request} owns no blocks")
        self.allocator.release(without_runs(runs, kept) if kept else runs)

    def evict(self, runs: Sequence[Run]) -> None:
        """Free cached blocks that no table holds."""
        self.allocator.release(list(runs))

    def reassign(self, before: str, request: str) -> None:
        """Give all blocks of `before` to `request`.

        Raises InvariantError if `request` owns blocks, or `before` none."""
        if request in self._runs or before not in self._runs:
            raise InvariantError(f"blocks of {before} cannot become those of {request}")
        self._runs[request] = self._runs.pop(before)

    def runs(self, request: str) -> tuple[Run, ...]:
        """Return the request's runs of blocks, in order of its tokens."""
        return tuple(self._runs[request])

    def owners(self) -> tuple[str, ...]:
        return tuple(self._runs)

    def check(self) -> None:
        """Raise InvariantError unless every block is free or owned exactly once."""
        self.allocator.check()
        owned = [run for runs in self._runs.values() for run in runs]
        expected = 0
        # Owned and free runs together must tile the pool without gap or overlap.
        for first, count in sorted([*owned, *self.allocator.free_runs()]):
            if first < expected:
                raise InvariantError(f"block {first} has two owners, or is owned and free")
            if first > expected:
                raise InvariantError(f"block {expected} is neither owned nor free")
            expected = first + count
        if expected != self.allocator.n_blocks:
            raise InvariantError("owned and free blocks do not add up to the pool")


def joined(runs: tuple[Run, ...], behind: tuple[Run, ...]) -> tuple[Run, ...]:
    """Return runs and further ones behind them; the two that touch are one run."""
    if runs and behind and sum(runs[-1]) == behind[0][0]:
        return (*runs[:-1], (runs[-1][0], runs[-1][1] + behind[0][1]), *behind[1:])
    return (*runs, *behind)


def joined_runs(blocks: Iterable[int]) -> tuple[Run, ...]:
    """Return block numbers as runs, in their order: consecutive ascending ones are one run."""
    runs: list[Run] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


def without_runs(runs: Sequence[Run], taken: Sequence[Run]) -> list[Run]:
    """Return the blocks of `runs` that are not in `taken`, ascending."""
    left: list[Run] = []
    holes = sorted(taken)
    for first, count in sorted(runs):
        at, end = first, first + count
        # The hole before the first block may reach into the run.
        for hole, width in holes[max(0, bisect_left(holes, (at, 0)) - 1) :]:
            if hole >= end:
                break
            if hole > at:
                left.append((at, hole - at))
            at = max(at, hole + width)
        if at < end:
            left.append((at, end - at))
    return left


# Slots of a request's tokens, from runs of slots: (first slot, count) in the order of its tokens.

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
