"""Protocol of an engine's KV cache as the iteration policy needs it: numbers of blocks."""

from __future__ import annotations

from typing import Protocol


class PrefixLookup(Protocol):
    """Implemented by `kv.prefix_cache.PrefixCache`: what of the prompts of waiting requests is cached."""

    def drain_changes(self) -> list[tuple[str, int]]:
        """Return requests that hold no KV and whose number of cached tokens has changed, with that number."""

    def cached_tokens(self, request: str) -> int | None:
        """Return the cached tokens of a request that holds no KV; None for any other."""

    def computed_by(self, request: str) -> str | None:
        """Return the request that computes the next block of a waiting request's prompt, if any does."""

    def restored(self, request: str) -> bool:
        """Return whether the next block of a waiting request's prompt is being read from elsewhere."""


class KvPool(Protocol):
    """Implemented by `kv.block_manager.BlockManager`; a plug-in implements it over its engine's block pool.

    All methods are called within a decision, so each must take constant time. The owner of the pool releases a pledge
    when the request ends or loses its KV.
    """

    reserve_tokens: int
    """Tokens reserved beyond what is known, and grown by on demand."""
    answers_hold: int
    """Decisions for which an answer of `needed_blocks` about a request without KV may be used; 0: it is asked again."""
    holders_grow: bool
    """Whether `held_blocks` of a request may change while it holds KV."""

    @property
    def n_blocks(self) -> int:
        """Blocks of the pool, free or not."""

    @property
    def total_tokens(self) -> int:
        """Tokens that all blocks hold."""

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither held by a request nor pledged to one."""

    @property
    def cache(self) -> PrefixLookup | None:
        """Cached prefixes that waiting requests would share; None: the pool looks no prompts up."""

    def needed_blocks(self, request_id: str, tokens: int) -> int:
        """Return how many more blocks a request needs for `tokens` tokens in all."""

    def held_blocks(self, request_id: str) -> int:
        """Blocks that a request holds or has been pledged; 0 for an unknown one."""

    def pledge(self, request_id: str, tokens: int, headroom_blocks: int = 0) -> bool:
        """Set aside blocks for `tokens` tokens of a request that is about to begin.

        False, and no change, if that would leave fewer than `headroom_blocks` free. An engine that allocates chunk by
        chunk must exclude blocks that are pledged and not yet allocated from `free_blocks`: otherwise several prefills
        in flight exhaust the pool and preempt each other."""
