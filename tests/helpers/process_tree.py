"""Processes by their ids: children, and whether one has ended."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.polling import until


def child_pids(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


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
