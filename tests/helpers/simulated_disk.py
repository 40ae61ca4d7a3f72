"""A disk whose calls fail by a seed: full, broken, short writes, and writes that are lost by a crash unless synced."""

from __future__ import annotations

import errno
import os
import random
import stat
from typing import Any


class SimulatedDisk:
    """Stands for the module `os` in a writer's module. Calls go to the real files, unless the seed says otherwise.

    rates: probability of each fault; `full` makes all writes fail with ENOSPC. A crash (`crash`) leaves of each file
    what was synced, and of later writes a random beginning.
    """

    def __init__(self, seed: int, *, fail: float = 0.0, short: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.fail, self.short = fail, short
        self.full = False
        self.faults = 0
        # Contents that are on the disk for sure, by inode; writes since then, as (offset, bytes).
        self._synced: dict[int, bytes] = {}
        self._since: dict[int, list[tuple[int, bytes]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _maybe_fail(self, *numbers: int) -> None:
        if self.random.random() < self.fail:
            self.faults += 1
            number = self.random.choice(numbers)
            raise OSError(number, os.strerror(number))

    def _cut(self, data: Any) -> Any:
        if self.full:
            self.faults += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._maybe_fail(errno.ENOSPC, errno.EIO)
        if len(data) > 1 and self.random.random() < self.short:
            self.faults += 1
            return memoryview(data)[: self.random.randrange(1, len(data))]
        return data

    def write(self, file: int, data: Any) -> int:
        data = self._cut(data)
        about = os.fstat(file)
        self._since.setdefault(about.st_ino, []).append((about.st_size, bytes(data)))
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        about = os.fstat(file)
        if self.random.random() < self.fail:
            self.faults += 1
            # As Linux does: the pages count as clean now, and are not on the disk.
            self._since.pop(about.st_ino, None)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(file)
        if stat.S_ISDIR(about.st_mode):
            return
        with open(f"/proc/self/fd/{file}", "rb") as synced:  # it may be open for writing only
            self._synced[about.st_ino] = synced.read()
        self._since.pop(about.st_ino, None)

    def crash(self, path: str) -> None:
        """Leave of a file what the disk has of it."""
        number = os.stat(path).st_ino
        content = bytearray(self._synced.get(number, b""))
        since = self._since.get(number, [])
        for at, data in since[: self.random.randrange(len(since) + 1)]:
            content.extend(bytes(max(0, at + len(data) - len(content))))
            content[at : at + len(data)] = data
        with open(path, "wb") as file:
            file.write(content)
