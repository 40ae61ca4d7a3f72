"""The journal's folder: private, of one user and one server, opened without following links."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from headway.core.errors import ConfigError

LOCK = "lock"
MARKER_BYTES = 8
"""Length of the marker that begins every frame of the journal (`journal`)."""
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class JournalFolder:
    """The folder `path`, created when missing, and its lock. All files in it are opened relative to it.

    ours: beginnings of the names of the journal's files. Raises ConfigError when another server has it, when it is a
    link or another user's, or when it cannot be made private because other files are in it.
    """

    def __init__(self, path: Path, ours: tuple[str, ...]) -> None:
        self.path = path
        self._folder = self._lock = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
            self._make_private((LOCK, *ours))
            self._lock = self.open(LOCK, os.O_CREAT | os.O_RDWR)
        except OSError as error:
            self.close()
            # O_NOFOLLOW and O_DIRECTORY say ELOOP or ENOTDIR for a link.
            why = "it is a link, and links are not followed" if path.is_symlink() else error.strerror
            raise ConfigError(f"--journal {path}: {why}") from error
        except BaseException:
            self.close()
            raise
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise ConfigError(f"--journal {path}: another server writes to it; give each its own folder") from None

    def open(self, name: str, flags: int) -> int:
        """Open a file of the folder, for its owner only. Raises OSError for a link."""
        file = os.open(name, flags | _FLAGS, 0o600, dir_fd=self._folder)
        os.fchmod(file, 0o600)
        return file

    def read(self, name: str) -> bytes:
        """Return a file's contents; empty when there is none. Raises OSError for a link."""
        try:
            file = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        with os.fdopen(file, "rb") as stream:
            return stream.read()

    def replace(self, source: str, target: str) -> None:
        """Rename a file, in place of another, durably."""
        os.replace(source, target, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        if name in os.listdir(self._folder):
            os.unlink(name, dir_fd=self._folder)

    def keep(self, name: str, copy: str) -> None:
        """Give a file a second name, under which it stays when the first is replaced."""
        os.link(name, copy, src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=False)

    def marker(self) -> bytes:
        """Return the folder's marker, drawn once: no client knows it, so no prompt can contain it."""
        found = os.pread(self._lock, MARKER_BYTES, 0)
        if len(found) == MARKER_BYTES:
            return found
        self.set_marker(os.urandom(MARKER_BYTES))
        return self.marker()

    def set_marker(self, marker: bytes) -> None:
        """Replace the folder's marker."""
        os.pwrite(self._lock, marker, 0)
        os.fsync(self._lock)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        for each in (self._lock, self._folder):
            if each >= 0:
                os.close(each)
        self._lock = self._folder = -1

    def _make_private(self, ours: tuple[str, ...]) -> None:
        found = os.fstat(self._folder)
        if found.st_uid != os.geteuid():
            raise ConfigError(f"--journal {self.path}: it is another user's folder; give one of your own")
        if stat.S_IMODE(found.st_mode) & 0o077 == 0:
            return
        others = sorted(name for name in os.listdir(self._folder) if not name.startswith(ours))
        if others:
            raise ConfigError(
                f"--journal {self.path}: other users may enter it and it holds {others[0]!r} besides; give the journal "
                "a folder of its own"
            )
        os.fchmod(self._folder, 0o700)
