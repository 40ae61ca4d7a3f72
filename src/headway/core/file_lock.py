"""Exclusive locks on open files, released when the process ends however it does."""

from __future__ import annotations

import errno
import fcntl
import threading

ATTEMPTS, PAUSE_S = 100, 0.05
"""How often to try for a lock, and the seconds between: an engine whose server was killed may hold it that long."""


def lock(descriptor: int, attempts: int) -> None:
    """Lock an open file, waiting for its holder for so many pauses. Raises BlockingIOError after that."""
    pause = threading.Event()
    for attempt in range(attempts + 1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == attempts:
                raise
            pause.wait(PAUSE_S)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            return  # a file system without locks
