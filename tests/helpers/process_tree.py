"""Processes: children, who listens at a socket, and whether one has ended."""

from __future__ import annotations

import os
from pathlib import Path

from tests.helpers.polling import until


def child_pids(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendant_pids(pid: int) -> list[int]:
    return [found for child in child_pids(pid) for found in (child, *descendant_pids(child))]


def engine_pid(server: int) -> int:
    """The engine of a server, which its standby has forked where it has one."""
    (child,) = child_pids(server)
    is_standby = b"template_process" in Path(f"/proc/{child}/cmdline").read_bytes()
    return child_pids(child)[0] if is_standby else child


def is_running(pid: int) -> bool:
    """Whether the process exists; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ends_soon(pid: int, timeout_s: float = 10.0) -> bool:
    """Whether the process ends within `timeout_s`."""
    try:
        until(lambda: not is_running(pid), timeout_s)
    except AssertionError:
        return False
    return True


_ACCEPTS = "00010000"
"""Flags of a listening socket in /proc/net/unix (`__SO_ACCEPTCON`)."""


def listener_pid(path: str) -> int:
    """The process that listens at a Unix socket. Raises AssertionError when none does within some seconds."""
    found: list[int] = []
    until(lambda: found.extend(_listeners(path)) or found, 10.0, f"nobody listens at {path}")
    return found[0]


def _listeners(path: str) -> list[int]:
    # Connections that it has accepted have the same path, and their sockets may be gone the next moment.
    sockets = (line.split() for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(path))
    links = {f"socket:[{fields[6]}]" for fields in sockets if fields[3] == _ACCEPTS}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(held) in links for held in (process / "fd").iterdir()):
                found.append(int(process.name))
        except OSError:
            # It has ended, or is another user's.
            continue
    return found
