"""A profile with what a run has learnt of it: the scales of `CorrectedLatency` worked into the table itself.

A grid that is measured alone, each point at its best, is faster than serving: caches are warm, nothing else runs, the
machine does not wake from idle. A run's scales say by how much, term by term; baked in, a simulation of another run
starts from what serving costs. The chunk table stays linear, so every scale goes in exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headway.perf.latency.tables import TableLatency, TableSource


def bake(source: TableSource, scales: Iterable[float], provenance: str) -> TableSource:
    """The table whose terms are `source`'s times `scales` = (fixed, rows, decodes, chunks), as `CorrectedLatency`
    applies them. `provenance` is added to the table's own."""
    fixed, rows, decodes, chunks = (float(scale) for scale in scales)
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
