"""vLLM's KV blocks of one full-attention group, with its prefix cache.

Requests of a workload are taken to share no text, so that a cached block is found again only by the request that filled
it, after a preemption. The order in which free blocks are taken decides which of them are still there by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

_CacheKey = tuple[str, int]
"""(request, index of the block in it)."""
_NULL_BLOCK = 0


class VllmBlockPool:
    """Free blocks in the order in which they are taken, and the blocks of each request."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool) -> None:
        """`num_blocks`: the null block included, which is never given to a request."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            block for block in range(num_blocks) if block != _NULL_BLOCK
        )
        self._held: dict[str, list[int]] = {}
        # Full blocks of a running request that are in the prefix cache.
        self._cached_blocks: dict[str, int] = {}
        # A prefix that was computed twice has two blocks: the older is found.
        self._cache: dict[_CacheKey, list[int]] = {}
        self._key_of: dict[int, _CacheKey] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - 1 - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def held_blocks(self, name: str) -> int:
        """Return the blocks of a request."""
        return len(self._held.get(name, ()))

    def cached_tokens(self, name: str, tokens: int) -> int:
        """Return the tokens at the start of a request without blocks that the prefix cache has, in whole blocks.

        At most `tokens` - 1: one token must be computed for its output."""
        return len(self._hits(name, tokens)) * self.block_size

    def needed_blocks(self, name: str, tokens: int) -> int:
        """Return the free blocks that a request takes for `tokens` tokens in all; cached ones are among the free."""
        return max(0, self.blocks_for(tokens) - self.held_blocks(name))

    def adopt(self, name: str, tokens: int) -> None:
        """Give a request without blocks those of its first `tokens` tokens from the prefix cache."""
        hits = self._hits(name, tokens + 1)
        for block in hits:
            del self._free[block]
        self._held[name] = hits
        self._cached_blocks[name] = len(hits)

    def allocate(self, name: str, tokens: int) -> None:
        """Take free blocks, so that the request has enough for `tokens` tokens. The caller has checked that they are
        there."""
        held = self._held.setdefault(name, [])
        for _ in range(self.blocks_for(tokens) - len(held)):
            block, _none = self._free.popitem(last=False)
            self._evict(block)
            held.append(block)

    def cache(self, name: str, tokens: int) -> None:
        """Enter the full blocks of a request's first `tokens` tokens in the prefix cache."""
        if not self.caching:
            return
        held, full = self._held[name], tokens // self.block_size
        for index in range(self._cached_blocks.get(name, 0), full):
            self._key_of[held[index]] = (name, index)
            self._cache.setdefault((name, index), []).append(held[index])
        self._cached_blocks[name] = max(full, self._cached_blocks.get(name, 0))

    def free(self, name: str) -> None:
        """Free the blocks of a request: those without cached content are taken next, the others last, tail first."""
        blocks = self._held.pop(name, [])
        self._cached_blocks.pop(name, None)
        blocks.reverse()
        self._append(block for block in blocks if block in self._key_of)
        for block in reversed([block for block in blocks if block not in self._key_of]):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def forget(self, name: str, tokens: int) -> None:
        """Drop the cache entries of a request that has ended; the order of free blocks stays."""
        for index in range(tokens // self.block_size + 1):
            for block in self._cache.pop((name, index), ()):
                del self._key_of[block]

    def _append(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._free[block] = None

    def _hits(self, name: str, tokens: int) -> list[int]:
        """Return the cached blocks of the first `tokens` - 1 tokens, up to the first that is missing."""
        found: list[int] = []
        for index in range((tokens - 1) // self.block_size):
            blocks = self._cache.get((name, index))
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def _evict(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            left = self._cache[key]
            left.remove(block)
            if not left:
                del self._cache[key]
