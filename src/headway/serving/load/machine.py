"""Host and software versions of a measurement, for its JSON. Nothing identifies a user or a path."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from headway.core.cpu_affinity import CORES
from headway.perf.hardware.processor import processor_name


def machine() -> dict[str, object]:
    """Return processor, usable cores and memory of the client's host; a remote server's are not known."""
    return {
        "cpu": processor_name(),
        "cores": len(CORES),
        "memory_gib": _memory_gib(),
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, Headway, torch and aiohttp, from metadata, without importing them."""
    found = {"python": platform.python_version()}
    for name in ("headway", "torch", "aiohttp"):
        try:
            found[name] = metadata.version(name)
        # torch and aiohttp are in the extra `serve`.
        except metadata.PackageNotFoundError:
            continue
    return found


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None
