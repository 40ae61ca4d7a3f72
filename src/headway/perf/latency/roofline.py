"""Roofline latency model: iteration time from FLOPs, bytes and a few efficiencies, for devices without a profile.

After Medha (§3.1-3.2, and the prototype's A1): matrix products take the larger of weight traffic and arithmetic;
attention of a chunk the larger of KV traffic and arithmetic; decodes read their KV once.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.base import MAX_CHUNK
from headway.perf.latency.table_latency import TableLatency, TableSource


class MachineRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates that a device reaches, after efficiencies."""

    linear_flops: float
    """FLOP/s of matrix products."""
    attention_flops: float
    """FLOP/s of attention."""
    bandwidth: float
    """Memory bytes/s."""
    fixed_s: float = 1e-3
    """Seconds of every iteration."""
    per_decode_s: float = 2e-5
    """Seconds of each decode in each layer, besides reading its KV."""
    name: str = "unnamed"


# Row counts and chunk sizes of the tables' knots; linear in between.
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, MAX_CHUNK)


def roofline(shape: ModelShape, rates: MachineRates) -> TableLatency:
    """Return the roofline of a whole model on one device, compiled to tables."""
    weights = shape.layers * shape.layer_parameters * shape.dtype_bytes + shape.vocab * shape.hidden * shape.dtype_bytes
    rows = np.array((0, *KNOTS, 2 * MAX_CHUNK), dtype=np.float64)
    arithmetic = np.array([shape.linear_flops(int(r)) for r in rows]) / rates.linear_flops
    # Weights are read once an iteration, however many rows there are, and not at all without rows.
    seconds = rates.fixed_s + np.maximum(arithmetic, np.where(rows > 0, weights / rates.bandwidth, 0.0))
    kv_read = shape.kv_bytes_per_token / rates.bandwidth
    chunks = []
    for c in (0, *KNOTS):
        own = shape.attention_flops(c, 0) / rates.attention_flops
        # Arithmetic of one more cached token for all rows of the chunk, or reading its KV once.
        per_past = max(shape.attention_flops(c, 1) - shape.attention_flops(c, 0), 0.0) / rates.attention_flops
        chunks.append((c, own, max(per_past, kv_read if c else 0.0)))
    return TableLatency(
        TableSource(
            fingerprint="",
            provenance=f"roofline of {rates.name}",
            tokens=tuple((int(r), float(s)) for r, s in zip(rows, seconds, strict=True)),
            chunks=tuple(chunks),
            decode=(0.0, rates.per_decode_s * shape.layers, kv_read),
        )
    )
