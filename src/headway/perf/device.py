"""What a worker runs on: its device (CPU or one CUDA device), the host's free memory, and the processor's name. Does
not import torch.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headway.core.errors import ConfigError

_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")


class CudaReport(msgspec.Struct, frozen=True):
    """CUDA as torch reports it."""

    torch: str
    """Version of torch."""
    built: bool = False
    """This torch is built with CUDA."""
    names: tuple[str, ...] = ()
    """Name of each device."""
    free_bytes: tuple[int, ...] = ()
    """Free bytes of each device once a process has opened it."""


class DeviceAssignment(msgspec.Struct, frozen=True):
    """A host's workers on devices first .. first + workers - 1, one each."""

    first: int
    """Number of the first device."""
    name: str
    """Name of the first device."""
    free_bytes: int
    """Free bytes of the device with the least."""


def check(asked: str) -> str:
    """Return a valid `--device` setting unchanged. Raises ConfigError for any other."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", asked) is None:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {asked!r}")
    return asked


def has_driver(files: Sequence[str] = _DRIVERS) -> bool:
    """Return whether this host has the driver of an accelerator that CUDA programs use: one of its files."""
    return any(Path(path).exists() for path in files)


def choose(
    asked: str, workers: int, look: Callable[[], CudaReport], there: Callable[[], bool] = has_driver
) -> DeviceAssignment | None:
    """Return the CUDA devices of `workers` workers; None: the CPU.

    "auto" takes the CPU unless there is a device for each worker. look: imports torch, which takes seconds; it is not
    called for "auto" without a driver. there: whether there is one. Raises ConfigError when the requested devices do
    not exist.
    """
    check(asked)
    if asked == "cpu" or (asked == "auto" and not there()):
        return None
    # Imports torch; every case above is decided without it.
    found = look()
    first = int(asked.partition(":")[2] or 0)
    have = len(found.names)
    if have >= first + workers:
        last = first + workers
        return DeviceAssignment(first, found.names[first], min(found.free_bytes[first:last]))
    # Fewer devices than workers: "auto" takes the CPU for all, never for some.
    if asked == "auto":
        return None
    if not found.built:
        raise ConfigError(f"--device {asked}: torch {found.torch} has no CUDA: install a CUDA build of torch")
    if not have:
        raise ConfigError(f"--device {asked}: torch {found.torch} finds no CUDA device on this host")
    raise ConfigError(
        f"--device {asked}: {workers} worker{'s' * (workers > 1)} on this host need as many CUDA devices, from number "
        f"{first} on, and there are {have}: use fewer workers, or --device cpu"
    )


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping: MemAvailable, or the cgroup's limit where lower."""
    # Assumed where /proc/meminfo cannot be read.
    available = 4 << 30
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        # Containers: cgroup v2 states "max" where there is no limit.
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return available


def gib(count: int) -> str:
    """Bytes for people: 1.5 GiB, 12.0 MiB."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def processor_name() -> str:
    """Return the CPU's model name, or the architecture where the system does not report one."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
