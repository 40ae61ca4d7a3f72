"""Name of this host's processor, part of a profile's fingerprint."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Return the CPU's model name, or the architecture where the system does not report one."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
