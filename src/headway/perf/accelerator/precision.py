"""Bytes of weights, activations and KV by type. Arithmetic keeps its FP16 rate: narrow operands are widened on chip."""

from __future__ import annotations

import msgspec

from headway.core.errors import ConfigError

BYTES: dict[str, float] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5 + 4 / 128,
}
"""Bytes a value. INT4 carries an FP16 scale and zero for each 128 values."""


class OperandTypes(msgspec.Struct, frozen=True, kw_only=True):
    """Types by name (keys of `BYTES`)."""

    weights: str = "fp16"
    activations: str = "fp16"
    kv: str = "fp16"

    def __post_init__(self) -> None:
        for name in ("weights", "activations", "kv"):
            if getattr(self, name) not in BYTES:
                raise ConfigError(f"precision.{name} must be one of {', '.join(BYTES)}, not {getattr(self, name)!r}")

    @property
    def weight_bytes(self) -> float:
        return BYTES[self.weights]

    @property
    def activation_bytes(self) -> float:
        return BYTES[self.activations]

    @property
    def kv_bytes(self) -> float:
        return BYTES[self.kv]
