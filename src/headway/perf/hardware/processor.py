"""Which processor this is: part of what a measurement holds for."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """The CPU's own name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
