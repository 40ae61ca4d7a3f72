"""Where a host's workers compute: on its CPU, or one each on its CUDA devices. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from headway.core.errors import ConfigError

_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")


class CudaReport(msgspec.Struct, frozen=True):
    """What torch says of CUDA. built: whether this torch can use it. By device: its name, and the bytes that are free
    once a process has opened it."""

    torch: str
    built: bool = False
    names: tuple[str, ...] = ()
    free_bytes: tuple[int, ...] = ()


class DeviceAssignment(msgspec.Struct, frozen=True):
    """A host's workers on devices first .. first + workers - 1, one each. name: what the first is called. free_bytes:
    of the one that has least."""

    first: int
    name: str
    free_bytes: int


def check(asked: str) -> str:
    """The setting, if it is one. Raises ConfigError otherwise."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", asked) is None:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {asked!r}")
    return asked


def choose(asked: str, workers: int, look: Callable[[], CudaReport]) -> DeviceAssignment | None:
    """None: on the CPU, which is also where "auto" stays unless there is a device for each of the `workers`.

    `look` asks torch, which takes seconds: not where there is no driver. Raises ConfigError, in one line, for what
    cannot be.
    """
    check(asked)
    if asked == "cpu" or (asked == "auto" and not any(Path(path).exists() for path in _DRIVERS)):
        return None
    found = look()
    first = int(asked.partition(":")[2] or 0)
    have = len(found.names)
    if have >= first + workers:
        last = first + workers
        return DeviceAssignment(first, found.names[first], min(found.free_bytes[first:last]))
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
