"""The journal's folder, with the marker of its frames."""

from __future__ import annotations

import os
from pathlib import Path

from headway.core.private_folder import PrivateFolder

MARKER_BYTES = 8
"""Length of the marker that begins every frame of the journal (`journal`)."""


class JournalFolder(PrivateFolder):
    """A `PrivateFolder` with a marker. ours: beginnings of the names of the journal's files."""

    def __init__(self, path: Path, ours: tuple[str, ...]) -> None:
        super().__init__(path, ours, "--journal")

    def keep(self, name: str, copy: str) -> None:
        """Give a file a second name, under which it stays when the first is replaced."""
        os.link(name, copy, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor, follow_symlinks=False)

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
