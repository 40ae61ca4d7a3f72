"""An accelerator as the operator model sees it: arrays, a vector unit, two on-chip buffers, and HBM."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.core.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30


class MachineModel(msgspec.Struct, frozen=True, kw_only=True):
    """Systolic arrays and a vector unit at one clock, on-chip buffers, and HBM."""

    name: str
    rows: int
    """MACs of an array along the depth of a product (R)."""
    columns: int
    """MACs of an array along its other side (C)."""
    arrays: int
    vector_lanes: int
    """MACs of the vector unit in one cycle."""
    clock_hz: float
    compute_bytes: int
    """On-chip memory for operands: double-buffered tiles and resident activations."""
    prefetch_bytes: int
    """Separate on-chip buffer for prefetched KV."""
    bandwidth: float
    """HBM bytes/s."""
    capacity: int
    """HBM bytes."""
    source: str = ""
    """Origin of the numbers, in words."""

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "arrays", "vector_lanes", "clock_hz", "compute_bytes", "bandwidth", "capacity"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"machine.{name} must be above 0, not {value}")
        if self.prefetch_bytes < 0:
            raise ConfigError(f"machine.prefetch_bytes must be 0 or more, not {self.prefetch_bytes}")

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all arrays in one cycle."""
        return self.rows * self.columns * self.arrays

    @property
    def flops(self) -> float:
        """Peak FLOP/s of the arrays."""
        return 2.0 * self.macs * self.clock_hz

    def with_(self, **changes: Any) -> MachineModel:
        """Return a copy with some fields changed. Raises ConfigError for an impossible value."""
        return msgspec.structs.replace(self, **changes)
