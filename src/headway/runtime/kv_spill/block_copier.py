"""Protocol of what copies blocks between the KV pool and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway.runtime.kv_spill.files import Rows


class BlockCopier(Protocol):
    """Implemented by `runtime.executor.pool_copier`. Called between batches only, when nothing else uses the pool."""

    dtype: str
    block_bytes: int

    def take(self, blocks: Sequence[int]) -> Rows:
        """Return a copy of blocks, in order."""

    def put(self, blocks: Sequence[int], rows: Rows) -> None:
        """Overwrite blocks, in order."""
