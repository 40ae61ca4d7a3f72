"""The folder of spilled KV: which blocks it holds, in which files, and what is deleted when it is full."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headway.core.errors import ConfigError
from headway.core.file_lock import ATTEMPTS
from headway.core.private_folder import PART, PrivateFolder
from headway.perf.hardware.memory import gib
from headway.runtime.kv_spill.files import (
    BlockFileError,
    BlockFileHead,
    BlockFormat,
    ForeignBlocksError,
    Rows,
    encoded,
    read_head,
    read_rows,
)

log = logging.getLogger("headway.engine")

FLAG = "--kv-spill"
_CONTEXTS = "contexts"
"""Folder inside, with the server's prepared documents (`serving.context_records`)."""
_FORMAT, _PREFIX, _SUFFIX = "format", "kv-", ".safetensors"
_PROBE, _PROBE_BYTES = "probe", 4 << 20
_FILE_BYTES = 8 << 20
"""Of one file: its copy takes some milliseconds, which decodes wait for."""


@dataclass(frozen=True)
class BlockRange:
    """Rows [first, first + count) of one file: consecutive blocks of a prompt."""

    head: BlockFileHead
    first: int
    count: int


class SpillFolder:
    """Blocks on disk by key, within `budget` bytes: files that were not used for longest are deleted for new ones.

    Methods of the index are for the engine's thread; `save`, `load` and `delete` only touch files and are for any.
    Raises ConfigError for a folder that is of another model or server, read-only or full.
    """

    def __init__(self, path: Path, blocks: BlockFormat, budget: int) -> None:
        self.blocks = blocks
        self.budget = budget
        self.file_blocks = max(1, _FILE_BYTES // blocks.block_bytes)
        """Most blocks of a file, and of a read."""
        self.used = 0
        """Bytes of blocks in files; what is being written included."""
        self._folder = PrivateFolder(path, (_PREFIX, _FORMAT, _PROBE, _CONTEXTS), FLAG, ATTEMPTS)
        self._files: OrderedDict[str, BlockFileHead] = OrderedDict()
        """Least recently used first."""
        self._places: dict[bytes, tuple[str, int]] = {}
        # Pins of each block; pinned files are not deleted.
        self._pinned: Counter[bytes] = Counter()
        self._serial = 0
        try:
            self._check_format()
            self.bytes_per_s = self._measure()
            """Speed of reading, at first as measured at the start."""
            self._index()
        except OSError as error:
            self.close()
            raise ConfigError(f"{FLAG} {path}: {error.strerror}; give a folder with room to write in") from error
        except ConfigError:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    # -- index ----------------------------------------------------------------------------------------------------

    def depth(self, keys: Sequence[bytes], start: int) -> int:
        """Return behind which block of a prompt the first one is missing here; its first `start` are not looked up."""
        at = start
        while at < len(keys) and keys[at] in self._places:
            at += 1
        return at

    def ranges(self, keys: Iterable[bytes]) -> list[BlockRange]:
        """Return where blocks lie, in order, and mark their files as used last. All must be here."""
        found: list[BlockRange] = []
        for key in keys:
            name, row = self._places[key]
            last = found[-1] if found else None
            follows = last is not None and last.head.name == name and last.first + last.count == row
            if last is not None and follows and last.count < self.file_blocks:
                found[-1] = replace(last, count=last.count + 1)
            else:
                found.append(BlockRange(self._files[name], row, 1))
        # The first blocks of a prompt last: without them those behind are of no use.
        for each in reversed(found):
            self._files.move_to_end(each.head.name)
        return found

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep blocks, here already or not, from deletion until `unpin`."""
        self._pinned.update(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Undo one `pin`."""
        self._pinned.subtract(keys)
        self._pinned = +self._pinned

    def claim(self, blocks: int) -> tuple[str, list[str]] | None:
        """Make room for a file of so many blocks. Return its name, and files to delete first. None: there is no room.

        The room is claimed until `add` or `give_up`."""
        needed = blocks * self.blocks.block_bytes
        victims: list[str] = []
        freed = 0
        for name, head in self._files.items():
            if self.used - freed + needed <= self.budget:
                break
            if not any(key in self._pinned for key in head.keys):
                victims.append(name)
                freed += self._size(head)
        if self.used - freed + needed > self.budget:
            return None
        for name in victims:
            self.forget(name)
        self.used += needed
        self._serial += 1
        # Unique among all servers of this folder, one after another.
        return f"{_PREFIX}{time.time_ns():x}-{self._serial}{_SUFFIX}", victims

    def add(self, head: BlockFileHead) -> None:
        """Index a file that has been written to the room claimed for it."""
        self._files[head.name] = head
        self._places.update((key, (head.name, row)) for row, key in enumerate(head.keys))

    def give_up(self, blocks: int) -> None:
        """Return the room of a file that could not be written."""
        self.used -= blocks * self.blocks.block_bytes

    def forget(self, name: str) -> bool:
        """Drop a file from the index: it is to be deleted, or is damaged. Return whether it was there."""
        head = self._files.pop(name, None)
        if head is None:
            return False
        self.used -= self._size(head)
        for row, key in enumerate(head.keys):
            if self._places.get(key) == (name, row):
                del self._places[key]
        return True

    # -- files ----------------------------------------------------------------------------------------------------

    def save(self, name: str, keys: Sequence[bytes], rows: Rows) -> BlockFileHead:
        """Write a file durably, whole or not at all. Raises OSError."""
        head, contents = encoded(self.blocks, name, keys, rows)
        self._folder.write(name, (contents,))
        return head

    def load(self, where: BlockRange) -> tuple[Rows, float]:
        """Return blocks and the seconds that reading took. Raises BlockFileError unless they are what was written."""
        began = time.perf_counter()
        rows = read_rows(self.blocks, self._folder.path, where.head, where.first, where.count)
        # For the next server, which sorts files by time.
        os.utime(self._folder.path / where.head.name)
        return rows, time.perf_counter() - began

    def delete(self, names: Iterable[str]) -> None:
        """Delete files."""
        for name in names:
            self._folder.remove(name)

    def close(self) -> None:
        """Let another server have the folder. Idempotent."""
        self._folder.close()

    def _size(self, head: BlockFileHead) -> int:
        return len(head.keys) * self.blocks.block_bytes

    def _check_format(self) -> None:
        """Raise ConfigError unless the folder is new or of this model."""
        names, mark = self._folder.names(), self.blocks.mark().encode()
        found = self._folder.read(_FORMAT)
        if not found and any(name.startswith(_PREFIX) for name in names):
            found = b"unknown"
        if found and found != mark:
            raise ConfigError(
                f"{FLAG} {self._folder.path}: it holds KV of another model or block size; give another folder, or "
                "delete it"
            )
        if not found:
            self._folder.write(_FORMAT, (mark,))

    def _measure(self) -> float:
        """Write and read some bytes. Return bytes per second of reading. Raises OSError where that is not possible."""
        self._folder.write(_PROBE, (os.urandom(_PROBE_BYTES),))
        try:
            file = self._folder.open(_PROBE, os.O_RDONLY)
            try:
                # So that it is the disk that is measured, not memory.
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                began = time.perf_counter()
                while os.read(file, 1 << 20):
                    pass
                return _PROBE_BYTES / max(time.perf_counter() - began, 1e-6)
            finally:
                os.close(file)
        finally:
            self._folder.remove(_PROBE)

    def _index(self) -> None:
        """Index the files of earlier servers. Torn ones are deleted, those of other models left alone."""
        for path in self._found():
            if path.name.endswith(PART):
                path.unlink()
                continue
            try:
                head = read_head(self.blocks, path)
            except ForeignBlocksError as error:
                log.warning("%s: %s; it is left out", FLAG, error)
                continue
            except BlockFileError as error:
                log.warning("%s: %s; it is deleted", FLAG, error)
                path.unlink()
                continue
            self.used += self._size(head)
            self.add(head)
        # A smaller budget than before: what is above it goes.
        over = [name for name in list(self._files) if self.used > self.budget and self.forget(name)]
        self.delete(over)
        if self._places:
            log.info("%s %s holds %s of KV", FLAG, self._folder.path, gib(self.used))

    def _found(self) -> Iterator[Path]:
        """Yield this folder's files of blocks, least recently used first."""
        paths = [self._folder.path / name for name in self._folder.names() if name.startswith(_PREFIX)]
        yield from sorted(paths, key=lambda path: path.stat().st_mtime)
