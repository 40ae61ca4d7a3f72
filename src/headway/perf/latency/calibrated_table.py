"""Latency tables with the scales that `CorrectedLatency` learned in a run multiplied into them.

A grid measured in isolation, each point at its best, is faster than serving: caches are warm, nothing else runs, the
host does not wake from idle. A run's scales give the ratio for each term; with them in the table, a simulation of
another run starts from the cost of serving. Every term of a table is linear in its scale, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headway.perf.latency.table_latency import TableLatency, TableSource


def bake(source: TableSource, scales: Iterable[float], provenance: str) -> TableSource:
    """Return `source` with its terms multiplied by `scales` = (fixed, rows, decodes, chunks).

    Equals `CorrectedLatency` with these scales. `provenance` is appended to the table's own."""
    fixed, rows, decodes, chunks = (float(scale) for scale in scales)
    # CorrectedLatency takes one row's time t1 as the fixed part: rows·(t - t1) + fixed·t1 = rows·t + t1·(fixed - rows).
    base_s = TableLatency(source).rows_s(1)
    grid, past = source.decode_grid, source.past
    return msgspec.structs.replace(
        source,
        provenance=f"{source.provenance}; {provenance}",
        tokens=tuple((count, max(0.0, seconds * rows + base_s * (fixed - rows))) for count, seconds in source.tokens),
        chunks=tuple((tokens, own * chunks, per_past * chunks) for tokens, own, per_past in source.chunks),
        decode=tuple(term * decodes for term in source.decode),
        decode_grid=None
        if grid is None
        else msgspec.structs.replace(
            grid,
            seconds=tuple(tuple(seconds * decodes for seconds in row) for row in grid.seconds),
            per_token=grid.per_token * decodes,
        ),
        past=None
        if past is None
        else msgspec.structs.replace(
            past, chunks=tuple((tokens, offset * chunks, slope * chunks) for tokens, offset, slope in past.chunks)
        ),
    )
