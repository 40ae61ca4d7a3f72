"""Temporary folder of one process, for sockets; removed on close, or after a kill by the next process.

A process that is killed cannot remove its folder. So each folder holds a locked file; the system frees the lock when
its process ends, however it ends, and the next `ScratchFolder` of the same prefix removes folders whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from headway.core.errors import ConfigError

_LOCK = "lock"
_LONGEST = 75
"""Characters of the temporary folder's path: a socket's may have 107, and its name and the folder's come behind."""
_YOUNG_S = 60.0
"""Youngest age at which a folder without a held lock is removed: a younger one may be about to take its lock."""


class ScratchFolder:
    """`path` exists until `close`. `prefix`: what the folder's name starts with; only such are ever removed.

    ConfigError where the temporary folder's path is too long for a socket's."""

    def __init__(self, prefix: str) -> None:
        root = Path(tempfile.gettempdir())
        if len(os.fsencode(root)) > _LONGEST:
            raise ConfigError(
                f"the temporary folder {root} has a path of {len(os.fsencode(root))} characters, too long for sockets "
                f"in it (at most {_LONGEST}): set TMPDIR to a shorter one"
            )
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        # Held until the process ends, however it ends.
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sweep(root, prefix, os.fstat(self._lock).st_mtime - _YOUNG_S)

    def close(self) -> None:
        """Remove the folder. Harmless when repeated."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(root: Path, prefix: str, before: float) -> None:
    """Remove this user's folders of that prefix, made `before`, whose process has ended; others stay."""
    for lock in root.glob(f"{prefix}*/{_LOCK}"):
        try:
            found = lock.stat()
            # The temporary folder is shared: never follow a link or touch another user's files.
            if lock.parent.is_symlink() or found.st_uid != os.getuid() or found.st_mtime > before:
                continue
            held = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(held)
