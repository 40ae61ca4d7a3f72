"""Latency profile of a model on this host and layout, measured on the live code by `headway profile`.

Three families are measured separately: attention of a chunk over a history (all layers, through the
backend), attention of a group of decodes, and the rest of a forward pass by its rows. Every point is the fastest of a
few runs. The whole grid costs up to `budget_s`; points that would not fit are left out, and the table's last slope
goes on from there.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import numpy as np

from headway.perf.latency.knot_fits import fit_decodes, fit_line
from headway.perf.latency.table_latency import TableSource


class ProfileGrid(NamedTuple):
    """Points to measure, each list ascending, in tokens."""

    rows: tuple[int, ...]
    """Rows of a forward pass."""
    chunks: tuple[int, ...]
    """Chunk sizes."""
    pasts: tuple[int, ...]
    """History before a chunk."""
    decodes: tuple[tuple[int, int], ...]
    """Decode groups: (requests, past of each)."""
    exchanged: tuple[int, ...]
    """Rows that KV groups exchange."""
    repeats: int
    """Runs of each point, of which the fastest counts."""


QUICK = ProfileGrid((1, 16, 64, 256), (8, 32, 128), (0, 2048), ((1, 128), (4, 1024)), (1, 16, 128), 3)
FULL = ProfileGrid(
    (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096),
    (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048),
    (0, 1024, 4096, 16384, 65536),
    ((1, 128), (1, 4096), (4, 1024), (16, 256), (16, 1024), (64, 256)),
    (1, 4, 16, 64, 256),
    5,
)


class MeasureFunction(Protocol):
    """Returns the seconds of `kind` (`runtime.executor.measure`): the least of `repeats` runs, on the slowest rank."""

    def __call__(self, kind: str, first: int, second: int, repeats: int) -> float: ...


def profile(
    ask: MeasureFunction,
    slots: int,
    grid: ProfileGrid,
    budget_s: float,
    fingerprint: str,
    provenance: str,
    groups: int = 1,
) -> TableSource:
    """Measure all points and fit the tables.

    There must be no requests: the pool of `slots` tokens of each of the KV `groups` is used as scratch.
    """
    deadline = time.perf_counter() + budget_s
    measure = _RepeatedMeasure(ask, grid.repeats)
    chunks = []
    longest = 0
    # Chunks get the first 45% of the budget, decodes up to 60%, forward passes the rest.
    share = deadline - 0.55 * budget_s
    for c in grid.chunks:
        points: list[tuple[int, float]] = []
        for past in grid.pasts:
            if past + c > slots or (len(points) >= 2 and time.perf_counter() > share):
                break
            points.append((past, measure("chunk", c, past)))
            longest = max(longest, past)
        if not points:
            break
        a, b = fit_line(points)
        chunks.append((c, a, b))
        if time.perf_counter() > share and len(chunks) >= 2:
            break
    decodes: list[tuple[int, int, float]] = []
    for n, past in grid.decodes:
        if n * (past + 1) <= slots and (len(decodes) < 2 or time.perf_counter() < deadline - 0.4 * budget_s):
            decodes.append((n, n * (past + 1), measure("decodes", n, past)))
    rows: list[tuple[int, float]] = []
    for t in grid.rows:
        if t > slots or (len(rows) >= 2 and time.perf_counter() > deadline):
            break
        seconds = measure("forward", t)
        # A forward pass includes attention of its own rows, which the chunk table counts: subtract it, but keep at
        # least 20%.
        own = float(np.interp(t, [c for c, _, _ in chunks], [a for _, a, _ in chunks])) if t > 1 else 0.0
        rows.append((t, max(seconds - own, 0.2 * seconds)))
    # An iteration without rows is not measurable: half of that of the smallest measured one stands for the fixed part.
    fixed = max(0.0, rows[0][1] * 0.5)
    return TableSource(
        fingerprint=fingerprint,
        provenance=provenance,
        tokens=((0, fixed), *rows),
        chunks=((0, 0.0, 0.0), *chunks),
        decode=fit_decodes(decodes),
        exchange=exchange(ask, slots, grid) if groups > 1 else None,
        validated_past=longest,
    )


def exchange(ask: MeasureFunction, slots: int, grid: ProfileGrid) -> tuple[float, float]:
    """Return (s an iteration, s a row and remote group) of `perf.latency.shard_exchange.Exchange`, over the live links.

    Takes some tenths of a second.
    """
    points: list[tuple[int, float]] = []
    for rows in sorted(grid.exchanged, reverse=True):
        if rows <= slots:
            seconds = ask("exchange", rows, 0, 4 * grid.repeats)
            # More rows never take less time: a point above a later (larger) one was disturbed, and is lowered to it.
            # Two processes have to run at the same moment, so more runs are disturbed than elsewhere.
            points.append((rows, min(seconds, points[-1][1]) if points else seconds))
    points = [(rows, seconds) for rows, seconds in reversed(points) if seconds > 0.0]
    return fit_line(points) if points else (0.0, 0.0)


class _RepeatedMeasure:
    """Repeats short measurements. Long ones (above 0.3 s) run once, after a run to warm up: they vary less."""

    def __init__(self, ask: MeasureFunction, repeats: int) -> None:
        self._ask = ask
        self._repeats = repeats
        self._last: dict[str, float] = {}

    def __call__(self, kind: str, first: int, second: int = 0) -> float:
        repeats = self._repeats if self._last.get(kind, 0.0) <= 0.3 else 1
        seconds = self._last[kind] = self._ask(kind, first, second, repeats)
        return seconds
