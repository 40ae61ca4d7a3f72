"""Cores that this process may use: those it was started with, even if a library has bound its threads since."""

from __future__ import annotations

import os


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
