"""Memory available on this host."""

from __future__ import annotations

from pathlib import Path


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
