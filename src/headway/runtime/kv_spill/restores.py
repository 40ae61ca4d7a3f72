"""Reads KV blocks of a prompt from disk into the pool, where that is faster than computing them.

A restore is a lease like a request's: it takes blocks, fills them range by range, and indexes what is in place, so that
requests that begin alike share it at once and wait for the rest, as they do for a prompt that another request computes.
The scheduler never sees it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from headway.kv.block_manager import BlockManager, KvLease
from headway.kv.prefix_cache import PrefixCache
from headway.runtime.kv_spill.block_copier import BlockCopier
from headway.runtime.kv_spill.disk_thread import Completion, DiskThread
from headway.runtime.kv_spill.files import BlockFileError, Rows
from headway.runtime.kv_spill.folder import FLAG, BlockRange, SpillFolder

log = logging.getLogger("headway.engine")

_READS_AHEAD = 2
_NEWEST = 0.3
"""Weight of the newest read in the measured speed of the disk."""


@dataclass
class _Restore:
    """One prefix that is being read."""

    name: str
    lease: KvLease
    blocks: list[int]
    """Of the whole prefix, in order."""
    at: int
    """How many of them are in place."""
    asked: deque[BlockRange]
    """What is still to be read."""
    reading: int = 0
    ended: bool = False


class BlockRestores:
    """The restores of one pool. Called by the engine's thread only."""

    def __init__(
        self,
        folder: SpillFolder,
        manager: BlockManager,
        copier: BlockCopier,
        disk: DiskThread,
        save: Callable[[], None],
    ) -> None:
        """`save`: copies evicted blocks before others take their place."""
        assert manager.cache is not None
        self.restored_tokens = 0
        self._cache: PrefixCache = manager.cache
        self._folder, self._manager, self._copier, self._disk, self._save = folder, manager, copier, disk, save
        self._restores: list[_Restore] = []
        self._begun = 0

    @property
    def busy(self) -> bool:
        return bool(self._restores)

    def begin(
        self, keys: Sequence[bytes], prompt_tokens: int, prefill_s: Callable[[int], float], headroom_blocks: int
    ) -> bool:
        """Begin to read what a prompt would share, if that is faster than computing it. Return whether it is read.

        `keys`: of the prompt's full blocks. `prefill_s`: seconds to compute a prompt of so many tokens, alone.
        `headroom_blocks`: to leave free, unless nothing is in use."""
        block = self._manager.block_tokens
        keys = keys[: min(len(keys), (prompt_tokens - 1) // block)]
        cached = self._cache.index.match(keys).depth
        depth = self._folder.depth(keys, cached)
        read_s = (depth - cached) * self._folder.blocks.block_bytes / self._folder.bytes_per_s
        if depth == cached or read_s >= prefill_s(depth * block) - prefill_s(cached * block):
            return False
        self._begun += 1
        # No client's id has this character.
        name = f"\0restore-{self._begun}"
        self._cache.register(name, keys[:depth], depth * block + 1, restores=True)
        lease = self._manager.reserve(name, depth * block, headroom_blocks if self._manager.used_tokens else 0)
        if lease is None:
            self._cache.forget(name)
            return False
        # What made room for it.
        self._save()
        blocks = [first + i for first, count in self._manager.where(name) for i in range(count)]
        restore = _Restore(name, lease, blocks, cached, deque(self._folder.ranges(keys[cached:depth])))
        self._restores.append(restore)
        self._read_ahead(restore)
        return True

    def _read_ahead(self, restore: _Restore) -> None:
        while restore.asked and restore.reading < _READS_AHEAD:
            where = restore.asked.popleft()
            restore.reading += 1
            self._disk.read(partial(self._read, restore, where))

    def _read(self, restore: _Restore, where: BlockRange) -> Completion:
        """Read one range, in the disk's thread."""
        try:
            rows, seconds = self._folder.load(where)
        except (BlockFileError, OSError) as error:
            failure = error
            return lambda: self._failed(restore, where, failure)
        return lambda: self._arrived(restore, rows, seconds)

    def _arrived(self, restore: _Restore, rows: Rows, seconds: float) -> None:
        restore.reading -= 1
        self._folder.bytes_per_s += _NEWEST * (rows.nbytes / max(seconds, 1e-6) - self._folder.bytes_per_s)
        if restore.ended:
            return
        end = restore.at + len(rows)
        self._copier.put(restore.blocks[restore.at : end], rows)
        restore.at = end
        self.restored_tokens += len(rows) * self._manager.block_tokens
        self._manager.note_computed(restore.name, end * self._manager.block_tokens)
        self._read_ahead(restore)
        if not restore.reading:
            self._end(restore)

    def _failed(self, restore: _Restore, where: BlockRange, error: Exception) -> None:
        """Forget a file that cannot be read: its blocks are computed again."""
        restore.reading -= 1
        name = where.head.name
        if self._folder.forget(name):
            log.warning("%s: %s; its prefixes are computed again", FLAG, error)
            self._disk.write(partial(self._delete, name))
        if not restore.ended:
            self._end(restore)

    def _delete(self, name: str) -> Completion:
        """Delete a damaged file, in the disk's thread."""
        with suppress(OSError):
            self._folder.delete((name,))
        return _nothing

    def _end(self, restore: _Restore) -> None:
        """Let go of a restore's blocks: those in place stay cached, others are free."""
        restore.ended = True
        self._restores.remove(restore)
        self._manager.free(restore.lease)
        self._cache.forget(restore.name)


def _nothing() -> None:
    """The completion of a job that leaves nothing to do."""
