"""The KV of one pool on disk: evicted and pinned blocks go out, and come in for prompts that begin with them.

Only for executors that compute within `submit`: between two batches nothing else reads or writes the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.kv.block_manager import BlockManager
from headway.runtime.kv_spill.block_copier import BlockCopier
from headway.runtime.kv_spill.disk_thread import DiskThread
from headway.runtime.kv_spill.folder import SpillFolder
from headway.runtime.kv_spill.restores import BlockRestores
from headway.runtime.kv_spill.writer import BlockWriter


class KvSpill:
    """Restores and writes over one folder and one thread. Called by the engine's thread only."""

    def __init__(self, folder: SpillFolder, manager: BlockManager, copier: BlockCopier) -> None:
        """`manager`: with a prefix cache."""
        self._folder = folder
        self._disk = DiskThread()
        self.writer = BlockWriter(folder, manager, copier, self._disk)
        self._restores = BlockRestores(folder, manager, copier, self._disk, self.writer.save_evicted)

    @property
    def busy(self) -> bool:
        """Whether blocks are being read or written, or are to be."""
        return bool(self._disk.unfinished) or self._restores.busy or self.writer.busy

    @property
    def arrived(self) -> bool:
        """Whether `turn` may bring blocks for which a prompt waits."""
        return self._restores.busy and self._disk.done

    @property
    def counts(self) -> dict[str, int]:
        """Statistics, by the names of `EngineStats`."""
        return {
            "kv_spilled_tokens_total": self.writer.written_tokens,
            "kv_spill_missed_tokens_total": self.writer.missed_tokens,
            "kv_restored_tokens_total": self._restores.restored_tokens,
            "kv_spill_bytes": self._folder.used,
        }

    def restore(
        self, keys: Sequence[bytes], prompt_tokens: int, prefill_s: Callable[[int], float], headroom_blocks: int
    ) -> bool:
        """See `BlockRestores.begin`."""
        return self._restores.begin(keys, prompt_tokens, prefill_s, headroom_blocks)

    def turn(self) -> list[str]:
        """Take what was read and written since. Return kept prefixes with nothing left to write since then."""
        # First: what has arrived may be put where evicted blocks are.
        self.writer.save_evicted()
        self._disk.take()
        return self.writer.turn()

    def wait(self, timeout_s: float) -> None:
        """Wait until something is read or written, at most so long."""
        self._disk.wait(timeout_s)

    def close(self) -> None:
        """Finish the writes that were begun, and let another server have the folder. Called once."""
        self._disk.close()
        self._folder.close()
