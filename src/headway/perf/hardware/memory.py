"""How much memory this machine has to give."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int:
    """Bytes that can be taken without swapping (MemAvailable, and the cgroup's limit where that is lower)."""
    available = 4 << 30
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
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
