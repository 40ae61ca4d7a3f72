"""Times of a device without profiles, from those of a profiled die and both data sheets.

Only what follows arithmetic or bandwidth is scaled. How long a kernel takes to start, or to walk over a history with a
few tiles, hardly differs between devices of one generation, and is kept.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headway.perf.hardware.accelerators import AcceleratorSpec
from headway.perf.latency.operators.curves import Column
from headway.perf.latency.operators.linear import base_ms

DERIVED_BANDS = {"linear": 0.32, "elementwise": 0.28, "prefill": 0.74, "decode": 0.74, "collectives": 0.40}
"""By operator family: nine of ten times derived for the A100 from the H100, for the H100 from the A100, and by either's
inverse, were within this share of the measured ones; attention's families have the worse of theirs
(`benchmarks.latency_bands`). Set by one derivation, this rule held 93% of products and elementwise operators, 99% of
prefills and 93% of decodes of the way back. Only two dies are measured, and each derivation needs both: a third may lie
outside. Collectives: a ring by the link's data sheet against vLLM's all-reduces under CUDA graphs; NCCL's alone, which
start later, miss by up to 0.72."""


class DeviceScaling(msgspec.Struct, frozen=True):
    """Conversion of a profiled die's milliseconds to another device's."""

    source: AcceleratorSpec
    """The profiled die."""
    device: AcceleratorSpec

    @property
    def same(self) -> bool:
        """Whether there is nothing to convert."""
        return self.device.kernels == self.source.name and self.device.bandwidth == self.source.bandwidth

    @property
    def _compute(self) -> float:
        return self.source.flops / self.device.flops

    @property
    def _memory(self) -> float:
        return self.source.bandwidth / self.device.bandwidth

    def products_ms(self, ms: Column, rows: Column, k: int, n: int) -> Column:
        """Return the time of rows × k by k × n products: scaled by the ratio of the rooflines."""
        if self.same:
            return ms
        kk, nn = np.full(rows.size, float(k)), np.full(rows.size, float(n))
        return ms * base_ms(self.device, rows, kk, nn) / base_ms(self.source, rows, kk, nn)

    def elementwise_ms(self, ms: Column) -> Column:
        """Return the time of elementwise operators: scaled by bandwidth."""
        return ms * self._memory

    def prefill_ms(self, ms: Column, start_ms: Column | float = 0.0) -> Column:
        """Return the time of a chunk's attention: what exceeds `start_ms`, that of one row, scaled by arithmetic."""
        kept = np.minimum(start_ms, ms)
        return np.asarray(kept + (ms - kept) * self._compute, dtype=np.float64)

    def decode_ms(self, ms: Column, reading_ms: Column) -> Column:
        """Return the time of decode attention: of it, `reading_ms`, the time to read the KV, scaled by bandwidth."""
        return np.asarray(ms + np.minimum(reading_ms, ms) * (self._memory - 1.0), dtype=np.float64)
