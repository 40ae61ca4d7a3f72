"""What one iteration of an accelerator is computed from: machine, precision, work, techniques, assumptions.

`MachineModel` is systolic arrays, a vector unit, on-chip memory for operands and for prefetched KV, and HBM.
Assumptions that the paper does not state are named fields with two presets. `default` is the real model, with times
from the mapping search. `paper` reproduces the figures of stages in the paper (docs/papers/accelerator.md): a
feed-forward layer of two matrices, no LM head, attention that is not causal, units at a constant share of their peak,
and 128 rows of a packed product for a decode batch.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headway.core.errors import ConfigError
from headway.perf.hardware import accelerator

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


_TABLE = "Table I of the packing-prefetch paper"


def _gpu(name: str, of: str, columns: int, l2_mib: int) -> MachineModel:
    device = accelerator(of)
    # MACs of all tensor cores in a cycle; the clock follows from the data sheet's FLOP/s.
    macs = 32 * columns * device.multiprocessors
    return MachineModel(
        name=name,
        rows=32,
        columns=columns,
        arrays=device.multiprocessors,
        vector_lanes=256 * device.multiprocessors,
        clock_hz=device.flops / (2.0 * macs),
        compute_bytes=l2_mib * MIB // 4,
        prefetch_bytes=l2_mib * MIB * 3 // 4,
        bandwidth=device.bandwidth,
        capacity=device.capacity,
        source=f"{device.source}; L2 of {l2_mib} MB",
    )


MACHINES: dict[str, MachineModel] = {
    m.name: m
    for m in (
        MachineModel(
            name="tpuv6e-like",
            rows=128,
            columns=128,
            arrays=16,
            vector_lanes=128 * 16 * 16,
            clock_hz=918e12 / (2 * 128 * 128 * 16),
            compute_bytes=80 * MIB,
            prefetch_bytes=512 * MIB,
            bandwidth=1.64e12,
            capacity=32 * GIB,
            source=_TABLE,
        ),
        MachineModel(
            name="tpuv7-like",
            rows=256,
            columns=256,
            arrays=16,
            vector_lanes=256 * 32 * 16,
            clock_hz=4614e12 / (2 * 256 * 256 * 16),
            compute_bytes=160 * MIB,
            prefetch_bytes=GIB,
            bandwidth=7.4e12,
            capacity=220 * GIB,
            source=_TABLE,
        ),
        _gpu("a100-like", "a100-80gb", 32, 40),
        _gpu("h100-like", "h100-80gb", 64, 50),
        _gpu("h200-like", "h200-141gb", 64, 50),
    )
}
"""Machines by name. TPU-like ones are Table I of the paper, which states FLOP/s and the arrays: the clock follows from
both (1.751 GHz and 2.200 GHz). Buffers and HBM capacity are read as MiB and GiB (512 MB is one layer of 128K tokens
only as 2^29 bytes), bandwidth as 10^9 bytes/s.

A GPU's multiprocessor is an array of as many MACs as its tensor cores do in a cycle, and 256 half-precision vector
lanes. Its L2 is the on-chip memory: a quarter for operands, three quarters for prefetched KV, the largest share that
the CUDA programming guide allows for persisting accesses. Register files and shared memory are not counted."""


def machine(name: str) -> MachineModel:
    """Return a machine by name, with or without `-like`. Raises ConfigError, listing those that exist."""
    key = name.lower()
    for known in (key, f"{key}-like"):
        if known in MACHINES:
            return MACHINES[known]
    raise ConfigError(f"unknown machine {name!r}; known: {', '.join(MACHINES)}")


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


class IterationWork(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill chunk and the decodes batched with it. Raises ConfigError when empty or contradictory."""

    prefill_tokens: int = 0
    """Tokens of the chunk."""
    prefill_past: int = 0
    """Cached tokens before the chunk."""
    decodes: int = 0
    """Decoding requests."""
    kv_tokens: int = 0
    """KV tokens that all decodes read together."""

    def __post_init__(self) -> None:
        for name in ("prefill_tokens", "prefill_past", "decodes", "kv_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"stage.{name} must be 0 or more, not {getattr(self, name)}")
        if not self.prefill_tokens and not self.decodes:
            raise ConfigError("stage.prefill_tokens and stage.decodes are both 0: there is nothing to compute")
        if self.prefill_past and not self.prefill_tokens:
            raise ConfigError("stage.prefill_past needs prefill_tokens of at least 1")
        if self.kv_tokens < self.decodes:
            raise ConfigError(
                f"stage.kv_tokens must be at least 1 a decode ({self.decodes}), not {self.kv_tokens}: "
                "it is what they read together"
            )
        if self.kv_tokens and not self.decodes:
            raise ConfigError("stage.kv_tokens needs decodes of at least 1")

    @property
    def prefill_only(self) -> IterationWork:
        """The chunk without decodes."""
        return msgspec.structs.replace(self, decodes=0, kv_tokens=0)

    @property
    def decode_only(self) -> IterationWork:
        """The decodes without the chunk."""
        return msgspec.structs.replace(self, prefill_tokens=0, prefill_past=0)


class TechniqueSet(msgspec.Struct, frozen=True, kw_only=True):
    """Techniques of the operators. (Packing and prefetch are modes of the timeline, not set here.)"""

    flash_attention: bool = True
    """Scores stay on chip."""
    fusion: str = "auto"
    """Activations stay on chip where they fit ("auto") or never ("off")."""
    double_buffering: bool = True
    """The next tile is loaded while one is computed."""

    def __post_init__(self) -> None:
        if self.fusion not in ("auto", "off"):
            raise ConfigError(f"techniques.fusion must be auto or off, not {self.fusion!r}")


Unit = Literal["vector", "array", "fastest"]


class AcceleratorAssumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Assumptions of the operator model; `WORDS` describes each field (docs/reference/accelerator-assumptions.md)."""

    preset: str = "default"
    ffn_matrices: int | None = None
    lm_head: bool = True
    causal: bool = True
    mapper: bool = True
    utilisation: float = 1.0
    decode_rows: int | None = None
    decode_attention: Unit = "fastest"
    kv_reread: bool = False
    decode_kv_written: bool = True
    prefetch_in_attention: bool = True
    across_iterations: bool = False
    ahead_bytes: int = 0
    softmax_ops: float = 5.0
    elementwise_ops: float = 4.0

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"assumptions.{name} must be {rule}, not {getattr(self, name)!r}")

        need(self.ffn_matrices in (None, 2, 3), "ffn_matrices", "2, 3 or null (the model's own)")
        need(0 < self.utilisation <= 1, "utilisation", "above 0 and at most 1")
        need(self.decode_rows is None or self.decode_rows >= 1, "decode_rows", "at least 1, or null (one a decode)")
        need(self.decode_attention in ("vector", "array", "fastest"), "decode_attention", "vector, array or fastest")
        for name in ("ahead_bytes", "softmax_ops", "elementwise_ops"):
            need(getattr(self, name) >= 0, name, "0 or more")


WORDS: dict[str, str] = {
    "ffn_matrices": "matrices of the feed-forward layer; null: the model's own (3 with a gate)",
    "lm_head": "the LM head runs once an iteration, for each row that yields a token",
    "causal": "a chunk attends to itself causally; else to the full square",
    "mapper": "times and HBM bytes come from the mapping search; else units run at `utilisation` of their peak",
    "utilisation": "share of peak that arrays and vector unit reach without the mapper",
    "decode_rows": "rows that a decode batch adds to a product, whatever its size; null: one a decode",
    "decode_attention": "unit that attends for decodes: vector, array, or the fastest",
    "kv_reread": "a chunk's new KV is read back from HBM by its own attention; else it is only written",
    "decode_kv_written": "the KV of decoded tokens is written to HBM (it always is; the paper's figures leave it out)",
    "prefetch_in_attention": "KV is prefetched during prefill attention too; else only beside products",
    "across_iterations": "the first layer's KV was prefetched by the iteration before; else its window is only its own",
    "ahead_bytes": "KV that the operand buffer holds ahead of decode attention without a prefetch buffer",
    "softmax_ops": "vector operations a score in prefill attention, beside the arrays",
    "elementwise_ops": "vector operations an element of norms, rotations, activations and residuals",
}

PRESETS: dict[str, AcceleratorAssumptions] = {
    "default": AcceleratorAssumptions(),
    "paper": AcceleratorAssumptions(
        preset="paper",
        ffn_matrices=2,
        lm_head=False,
        causal=False,
        mapper=False,
        utilisation=0.9755,
        decode_rows=128,
        decode_attention="vector",
        kv_reread=True,
        decode_kv_written=False,
        prefetch_in_attention=True,
        across_iterations=True,
        ahead_bytes=4 << 20,
        softmax_ops=0.0,
        elementwise_ops=0.0,
    ),
}


def assumptions(preset: str = "default", **changes: Any) -> AcceleratorAssumptions:
    """Return a preset with some fields changed. Raises ConfigError, listing valid names, for an unknown one."""
    if preset not in PRESETS:
        raise ConfigError(f"assumptions.preset must be one of {', '.join(PRESETS)}, not {preset!r}")
    for name in changes:
        if name not in WORDS:
            raise ConfigError(f"assumptions.{name} is not a field; allowed here: preset, {', '.join(WORDS)}")
    return msgspec.structs.replace(PRESETS[preset], **changes)
