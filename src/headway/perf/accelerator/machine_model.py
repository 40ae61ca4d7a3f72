"""An accelerator as the operator model sees it: arrays, a vector unit, two on-chip buffers, and HBM."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.core.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30


class MachineModel(msgspec.Struct, frozen=True, kw_only=True):
    """`arrays` systolic arrays of rows × columns MACs, and a vector unit of `vector_lanes` MACs, at one clock.

    compute_bytes: on-chip memory for operands (double-buffered tiles, activations that stay). prefetch_bytes: the
    buffer beside it that holds prefetched KV. bandwidth: HBM bytes/s. capacity: HBM bytes.
    """

    name: str
    rows: int
    columns: int
    arrays: int
    vector_lanes: int
    clock_hz: float
    compute_bytes: int
    prefetch_bytes: int
    bandwidth: float
    capacity: int
    source: str = ""

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
        """The same machine with other numbers; ConfigError where one is impossible."""
        return msgspec.structs.replace(self, **changes)
