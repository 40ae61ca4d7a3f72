"""A rank's process on another host, with the interface of a local process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from threading import Condition

from headway.runtime.launcher.host_messages import LaunchProcess


class RemoteProcess:
    """Made by `HostCoordinator.launch`, which sets `ended` and `pid` from what the host says. Safe between threads.

    ended: None, or why it is gone, in words that follow 'worker 3'. abandoned: its host did not come back in time.
    """

    def __init__(self, launch: LaunchProcess, node: int, changed: Condition, drop: Callable[[int], None]) -> None:
        self.launch = launch
        self.node = node
        self.name = f"headway-rank-{launch.rank} on node {node}"
        self.pid: int | None = None
        self.ended: str | None = None
        self.abandoned = False
        self.sentinel, self._held = os.pipe()
        self._changed = changed
        self._drop = drop
        weakref.finalize(self, os.close, self.sentinel)

    def end(self, why: str) -> None:
        """It is gone: `sentinel` becomes readable. Called with the lock held."""
        if self.ended is None:
            self.ended = why
            os.close(self._held)
            self._changed.notify_all()

    def is_alive(self) -> bool:
        """Whether it shall run and nothing else is known."""
        return self.ended is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or is on a host that is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended is not None, timeout)

    def kill(self) -> None:
        """Remove the process from its host's `DesiredState`, which the host follows as soon as it gets it."""
        self._drop(self.launch.serial)
