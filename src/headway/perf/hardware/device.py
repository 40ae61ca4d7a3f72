"""Choice of the device of a host's workers: its CPU, or one CUDA device for each. Does not import torch."""

from __future__ import annotations

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
