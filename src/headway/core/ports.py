"""TCP ports of this machine."""

from __future__ import annotations

import socket

from headway.core.errors import ConfigError


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
