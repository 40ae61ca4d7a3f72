"""This machine: its operating system, the cores that the process may use, and its TCP ports."""

from __future__ import annotations

import ctypes
import os
import socket
import sys

from headway.core.errors import ConfigError

_MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of malloc.h."""
_MAPPED_BYTES = 128 << 10
"""Blocks of so many bytes or more are mapped one by one, and unmapped when they are freed."""


def require_linux(what: str) -> None:
    """Raise ConfigError on another system than Linux. what: the command or class that was asked for."""
    if sys.platform != "linux":
        raise ConfigError(
            f"{what} computes on Linux only; here run simulate, plan, reproduce, accel, trace, why, doctor and "
            "bench --url"
        )


def give_back_memory() -> None:
    """Let large blocks go back to the system when they are freed, where the C library is glibc: called once by a
    process that takes in bodies of any size.

    By default glibc keeps blocks below a bound that grows with each large one, and bodies of many sizes leave its heap
    full of holes."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)


def _usable() -> tuple[int, ...]:
    """Return the cores of this process's affinity mask, ascending."""
    # macOS has no affinity masks.
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


CORES = _usable()
"""Numbers of the system, in order. Taken when this module is imported, which must be before torch is."""


def shares(parts: int) -> list[tuple[int, ...]]:
    """The cores in so many parts of neighbours, as equal as they can be; more parts than cores share them in turn."""
    count = len(CORES)
    if parts >= count:
        return [(CORES[part % count],) for part in range(parts)]
    return [CORES[part * count // parts : (part + 1) * count // parts] for part in range(parts)]


def check_port(port: int) -> None:
    """Raise ConfigError where the value of `--port` is none."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port}: a port is 0 to 65535")


def free_port() -> int:
    """Return a TCP port that is free on loopback at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        # Another process may take the port before its user binds it; the start then fails with its message.
        return int(probe.getsockname()[1])
