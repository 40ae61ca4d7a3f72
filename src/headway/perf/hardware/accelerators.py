"""Accelerators as data sheets state them: peak arithmetic, memory, and what links them inside a node.

Peaks are dense bf16 (no sparsity); the shares that kernels reach are in `latency/`. Capacity is as the driver reports
it (MiB), not the marketing GB.
"""

from __future__ import annotations

import msgspec

from headway.core.errors import ConfigError
from headway.perf.hardware.links import NetworkLink, link

_MIB = 1 << 20


class AcceleratorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Data sheet of one accelerator."""

    name: str
    flops: float
    """Peak dense bf16 FLOP/s."""
    bandwidth: float
    """HBM bytes/s."""
    capacity: int
    """HBM bytes."""
    multiprocessors: int
    """Multiprocessors, which is the number of tiles that run at once."""
    nvlink: str
    """Name of the link inside a node."""
    network: str
    """Name of the link between nodes."""
    per_node: int = 8
    """Accelerators in one node."""
    die: str = ""
    """Profiled accelerator with the same die (an A800 computes as an A100 does); empty: this one."""
    source: str = ""
    """Origin of the numbers, in words."""

    @property
    def kernels(self) -> str:
        """Name under which profiles of this die's kernels are stored."""
        return self.die or self.name

    @property
    def inside(self) -> NetworkLink:
        return link(self.nvlink)

    @property
    def across(self) -> NetworkLink:
        return link(self.network)


def _a100(
    name: str, bandwidth: float, mib: int, nvlink: str = "nvlink3", die: str = "", source: str = ""
) -> AcceleratorSpec:
    return AcceleratorSpec(
        name=name,
        flops=312e12,
        bandwidth=bandwidth,
        capacity=mib * _MIB,
        multiprocessors=108,
        nvlink=nvlink,
        network="ib-200",
        die=die,
        source=source or "NVIDIA A100 data sheet (SXM4)",
    )


def _h100(
    name: str, bandwidth: float, mib: int, nvlink: str = "nvlink4", die: str = "", source: str = ""
) -> AcceleratorSpec:
    return AcceleratorSpec(
        name=name,
        flops=989.4e12,
        bandwidth=bandwidth,
        capacity=mib * _MIB,
        multiprocessors=132,
        nvlink=nvlink,
        network="ib-400",
        die=die,
        source=source or "NVIDIA H100 data sheet (SXM5)",
    )


ACCELERATORS: dict[str, AcceleratorSpec] = {
    a.name: a
    for a in (
        _a100("a100-80gb", 2.039e12, 81920),
        _a100("a100-40gb", 1.555e12, 40960),
        _a100("a800-80gb", 2.039e12, 81920, "nvlink-400", "a100-80gb", "an A100-80 with NVLink at 400 GB/s"),
        _h100("h100-80gb", 3.35e12, 81559),
        _h100("h800-80gb", 3.35e12, 81559, "nvlink-400", "h100-80gb", "an H100-80 with NVLink at 400 GB/s"),
        _h100("h200-141gb", 4.8e12, 143771, source="NVIDIA H200 data sheet (SXM): H100's arithmetic, HBM3e"),
        AcceleratorSpec(
            name="h20-96gb",
            flops=148e12,
            bandwidth=4.0e12,
            capacity=97871 * _MIB,
            multiprocessors=78,
            nvlink="nvlink4",
            network="ib-400",
            source="H20 as its vendors list it: 148 TFLOP/s bf16, 4.0 TB/s, 96 GB",
        ),
        AcceleratorSpec(
            name="l40s-48gb",
            flops=362e12,
            bandwidth=0.864e12,
            capacity=46068 * _MIB,
            multiprocessors=142,
            nvlink="pcie4",
            network="roce-200",
            source="NVIDIA L40S data sheet; no NVLink",
        ),
    )
}

ALIASES = {"a100": "a100-80gb", "h100": "h100-80gb", "a800": "a800-80gb", "h800": "h800-80gb", "h200": "h200-141gb"}


def accelerator(name: str) -> AcceleratorSpec:
    """Return an accelerator by name or alias (`a100`, `h100`, …). Raises ConfigError, listing those that exist."""
    key = name.lower()
    key = ALIASES.get(key, key)
    if key not in ACCELERATORS:
        raise ConfigError(f"unknown accelerator {name!r}; known: {', '.join((*ACCELERATORS, *ALIASES))}")
    return ACCELERATORS[key]


def of_device(name: str) -> AcceleratorSpec | None:
    """Return the accelerator that a driver calls `name` ("NVIDIA H100 80GB HBM3"); None: no data sheet of it is known.

    Forms of less power or bandwidth (PCIe, NVL, MIG slices) have other peaks, and count as unknown.
    """
    words = name.upper().replace("-", " ").split()
    if any(word in ("PCIE", "NVL", "MIG", "GH200") for word in words):
        return None
    for spec in ACCELERATORS.values():
        die, size = spec.name.upper().split("-")
        # H200 has one size only, which its name leaves out.
        sizes = [word for word in words if word.endswith("GB") and word[:-2].isdigit()]
        if die in words and (not sizes or size in sizes):
            return spec
    return None
