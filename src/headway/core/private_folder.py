"""A folder of files that hold prompts: private, of one user and one process, opened without following links."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headway.core.errors import ConfigError
from headway.core.file_lock import lock

LOCK = "lock"
PART = ".part"
"""End of the name of a file that is being written. After a crash one may be left."""
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """The folder `path`, created when missing, and its lock. All files in it are opened relative to it.

    ours: beginnings of the names of the files that it holds; flag: the setting that names it, for errors; attempts: how
    often to wait for the lock. Raises ConfigError when another process has it, when it is a link or another user's,
    when it cannot be written, or when it cannot be made private because other files are in it.
    """

    def __init__(self, path: Path, ours: tuple[str, ...], flag: str, attempts: int = 0) -> None:
        self.path = path
        self._flag = flag
        self._descriptor = self._lock = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
            self._make_private((LOCK, *ours))
            self._lock = self.open(LOCK, os.O_CREAT | os.O_RDWR)
        except OSError as error:
            self.close()
            # O_NOFOLLOW and O_DIRECTORY say ELOOP or ENOTDIR for a link.
            why = "it is a link, and links are not followed" if path.is_symlink() else error.strerror
            raise ConfigError(f"{flag} {path}: {why}; give a folder that can be written to") from error
        except BaseException:
            self.close()
            raise
        try:
            lock(self._lock, attempts)
        except OSError:
            self.close()
            raise ConfigError(f"{flag} {path}: another server writes to it; give each its own folder") from None

    def open(self, name: str, flags: int) -> int:
        """Open a file of the folder, for its owner only. Raises OSError for a link, a pipe or a device."""
        # Without waiting for the other end of a pipe of that name.
        file = os.open(name, flags | os.O_NONBLOCK | _FLAGS, 0o600, dir_fd=self._descriptor)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, f"{name} in it is not a regular file")
            os.fchmod(file, 0o600)
        except BaseException:
            os.close(file)
            raise
        return file

    def read(self, name: str) -> bytes:
        """Return a file's contents; empty when there is none. Raises OSError for a link."""
        try:
            file = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        with os.fdopen(file, "rb") as stream:
            return stream.read()

    def names(self) -> list[str]:
        """Return the names of all that the folder holds, sorted."""
        return sorted(os.listdir(self._descriptor))

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a file durably: until all of it is on the disk, the name stands for what it stood for before.

        Raises OSError, and leaves no part behind."""
        part = f"{name}{PART}"
        try:
            with os.fdopen(self.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), "wb", buffering=0) as stream:
                for piece in pieces:
                    left = memoryview(piece).cast("B")
                    while left:
                        left = left[stream.write(left) :]
                os.fsync(stream.fileno())
            self.replace(part, name)
        except OSError:
            with suppress(OSError):
                self.remove(part)
            raise

    def replace(self, source: str, target: str) -> None:
        """Rename a file, in place of another, durably."""
        os.replace(source, target, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        os.fsync(self._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        if name in os.listdir(self._descriptor):
            os.unlink(name, dir_fd=self._descriptor)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        for each in (self._lock, self._descriptor):
            if each >= 0:
                os.close(each)
        self._lock = self._descriptor = -1

    def _make_private(self, ours: tuple[str, ...]) -> None:
        found = os.fstat(self._descriptor)
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{self._flag} {self.path}: it is another user's folder; give one of your own")
        if stat.S_IMODE(found.st_mode) & 0o077 == 0:
            return
        others = sorted(name for name in os.listdir(self._descriptor) if not name.startswith(ours))
        if others:
            raise ConfigError(
                f"{self._flag} {self.path}: other users may enter it and it holds {others[0]!r} besides; give a folder "
                "of its own"
            )
        os.fchmod(self._descriptor, 0o700)
