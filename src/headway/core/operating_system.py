"""Where the native engine runs."""

from __future__ import annotations

import sys

from headway.core.errors import ConfigError


def require_linux(what: str) -> None:
    """Raise ConfigError on another system than Linux. what: the command or class that was asked for."""
    if sys.platform != "linux":
        raise ConfigError(
            f"{what} computes on Linux only; here run simulate, plan, reproduce, accel, trace, why, doctor and "
            "bench --url"
        )
