"""Accelerator models by name. TPU-like ones are Table I of the paper; GPUs are data sheets modelled as arrays.

Table I states FLOP/s and the arrays; the clock follows from both (1.751 GHz and 2.200 GHz). Buffers and HBM capacity
are read as MiB and GiB (512 MB is one layer of 128K tokens only as 2^29 bytes), bandwidth as 10^9 bytes/s.

A GPU's multiprocessor is an array of as many MACs as its tensor cores do in a cycle, and 256 half-precision vector
lanes. Its L2 is the on-chip memory: a quarter for operands, three quarters for prefetched KV, the largest share that
the CUDA programming guide allows for persisting accesses. Register files and shared memory are not counted.
"""

from __future__ import annotations

from headway.core.errors import ConfigError
from headway.perf.accelerator.machine_model import GIB, MIB, MachineModel
from headway.perf.hardware.accelerators import accelerator

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


def machine(name: str) -> MachineModel:
    """Return a machine by name, with or without `-like`. Raises ConfigError, listing those that exist."""
    key = name.lower()
    for known in (key, f"{key}-like"):
        if known in MACHINES:
            return MACHINES[known]
    raise ConfigError(f"unknown machine {name!r}; known: {', '.join(MACHINES)}")
