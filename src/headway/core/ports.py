"""TCP ports of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a TCP port that is free on loopback at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        # Another process may take the port before its user binds it; the start then fails with its message.
        return int(probe.getsockname()[1])
