"""Writes KV blocks to disk: those that are evicted, and those of pinned prefixes while they stay in memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from headway.kv.block_manager import BlockManager
from headway.kv.prefix_cache import PrefixCache
from headway.kv.prefix_index import PrefixNode
from headway.runtime.kv_spill.block_copier import BlockCopier
from headway.runtime.kv_spill.disk_thread import Completion, DiskThread
from headway.runtime.kv_spill.files import Rows
from headway.runtime.kv_spill.folder import FLAG, SpillFolder

log = logging.getLogger("headway.engine")

_MOST_AT_ONCE = 128 << 20
"""Most bytes that one decision's evictions copy."""
_MOST_WAITING = 256 << 20
"""Most bytes that wait to be written; what is evicted beyond is not kept."""


@dataclass
class _KeptPrefix:
    """A prefix that is to stay on disk."""

    keys: list[bytes]
    at: int = 0
    """How many of its blocks have been copied or are on disk."""
    settled: bool = False
    """Whether all that is to be written has been."""


class BlockWriter:
    """The writes of one pool. Called by the engine's thread only."""

    def __init__(self, folder: SpillFolder, manager: BlockManager, copier: BlockCopier, disk: DiskThread) -> None:
        assert manager.cache is not None
        self.written_tokens = 0
        self.missed_tokens = 0
        """Evicted and not kept: the disk did not keep up, or is full."""
        self._cache: PrefixCache = manager.cache
        self._cache.on_evict = self._note_evicted
        self._folder, self._manager, self._copier, self._disk = folder, manager, copier, disk
        # (depth, key, block) of what was evicted and not yet copied: the next batch may overwrite it.
        self._evicted: list[tuple[int, bytes, int]] = []
        # Copies that wait to be written, and keys of these and of those being written.
        self._waiting: deque[tuple[bytes, Rows]] = deque()
        self._unwritten: set[bytes] = set()
        self._kept: dict[str, _KeptPrefix] = {}
        self._writing = False
        # Whether the last write failed: a full disk is logged once.
        self._failed = False

    @property
    def busy(self) -> bool:
        return bool(self._unwritten or self._evicted or any(not kept.settled for kept in self._kept.values()))

    def keep(self, name: str, keys: Sequence[bytes]) -> None:
        """Write a prefix that is in memory, and keep it on disk until `release`."""
        self._folder.pin(keys)
        self._kept[name] = _KeptPrefix(list(keys))

    def release(self, name: str) -> None:
        """Let a prefix's files be deleted when room is needed. Unknown names are ignored."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._folder.unpin(kept.keys)

    def stores(self, name: str) -> bool:
        """Return whether a kept prefix is on disk as a whole."""
        kept = self._kept.get(name)
        return kept is not None and all(key in self._folder for key in kept.keys)

    def turn(self) -> list[str]:
        """Carry on with writing. Return the kept prefixes of which nothing is left to write since the last call."""
        self.save_evicted()
        for kept in self._kept.values():
            self._copy_kept(kept)
        self._write_next()
        settled = []
        for name, kept in self._kept.items():
            if not kept.settled and kept.at == len(kept.keys) and self._unwritten.isdisjoint(kept.keys):
                kept.settled = True
                settled.append(name)
        return settled

    def save_evicted(self) -> None:
        """Copy blocks that were evicted: called before anything else is written to the pool."""
        if not self._evicted:
            return
        # The first blocks of prompts come first: without them those behind, evicted earlier, are of no use.
        evicted, self._evicted = sorted(self._evicted), []
        bytes_each = self._folder.blocks.block_bytes
        room = max(0, min(_MOST_AT_ONCE, _MOST_WAITING - len(self._waiting) * bytes_each)) // bytes_each
        self.missed_tokens += len(evicted[room:]) * self._manager.block_tokens
        self._copy([key for _, key, _ in evicted[:room]], [block for _, _, block in evicted[:room]])
        self._write_next()

    def _note_evicted(self, node: PrefixNode) -> None:
        key = node.key
        assert isinstance(key, bytes)
        if key not in self._folder and key not in self._unwritten:
            self._evicted.append((node.depth, key, node.block))

    def _copy(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        if keys:
            rows = self._copier.take(blocks)
            self._waiting.extend((key, rows[i : i + 1]) for i, key in enumerate(keys))
            self._unwritten.update(keys)

    def _copy_kept(self, kept: _KeptPrefix) -> None:
        """Copy the next blocks of a kept prefix, while the disk keeps up."""
        if kept.at == len(kept.keys) or len(self._waiting) >= self._folder.file_blocks:
            return
        path = self._cache.index.path(self._cache.index.match(kept.keys))
        copied: list[tuple[bytes, int]] = []
        while kept.at < len(path) and len(copied) < self._folder.file_blocks:
            key = kept.keys[kept.at]
            if key not in self._folder and key not in self._unwritten:
                copied.append((key, path[kept.at]))
            kept.at += 1
        # What has been evicted meanwhile, of a prefix that is not pinned, was copied then.
        if kept.at >= len(path):
            kept.at = len(kept.keys)
        self._copy([key for key, _ in copied], [block for _, block in copied])

    def _write_next(self) -> None:
        """Begin the next file, unless one is being written."""
        while self._waiting and not self._writing:
            batch = [self._waiting.popleft() for _ in range(min(self._folder.file_blocks, len(self._waiting)))]
            claimed = self._folder.claim(len(batch))
            if claimed is None:
                self._miss(batch, "it is full of prepared documents; delete some, or raise --kv-spill-size")
                continue
            name, victims = claimed
            self._writing = True
            self._disk.write(partial(self._write, name, victims, batch))

    def _write(self, name: str, victims: list[str], batch: list[tuple[bytes, Rows]]) -> Completion:
        """Write one file, in the disk's thread."""
        try:
            self._folder.delete(victims)
            head = self._folder.save(name, [key for key, _ in batch], np.concatenate([row for _, row in batch]))
        except OSError as error:
            why = f"{error.strerror}; make room, or lower --kv-spill-size"
            return partial(self._write_failed, batch, why)

        def written() -> None:
            self._writing = self._failed = False
            self._folder.add(head)
            self._unwritten.difference_update(head.keys)
            self.written_tokens += len(batch) * self._manager.block_tokens
            self._write_next()

        return written

    def _write_failed(self, batch: list[tuple[bytes, Rows]], why: str) -> None:
        self._writing = False
        self._folder.give_up(len(batch))
        self._miss(batch, why)
        self._write_next()

    def _miss(self, batch: list[tuple[bytes, Rows]], why: str) -> None:
        """Drop copies that cannot be written. Logged when it begins."""
        if not self._failed:
            log.warning("%s: %s; what is evicted now is computed again", FLAG, why)
        self._failed = True
        self._unwritten.difference_update(key for key, _ in batch)
        self.missed_tokens += len(batch) * self._manager.block_tokens
