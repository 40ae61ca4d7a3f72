"""TCP ports of this machine."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_port() -> int:
    """Return a TCP port that is free on loopback at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        # Another process may take the port before its user binds it; the start then fails with its message.
        return int(probe.getsockname()[1])


def free_ports(count: int) -> int:
    """Return the first of so many consecutive ports that are free on loopback at present."""
    while True:
        first = free_port()
        try:
            with ExitStack() as probes:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
                return first
        except (OSError, OverflowError):
            continue
