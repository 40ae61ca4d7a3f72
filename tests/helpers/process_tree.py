"""Processes by their ids: children, and whether one has ended."""

from __future__ import annotations

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
