"""Span tasks and the prefix cache of their instance: what a prompt takes from it, and what it leaves there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from headway.kv.block_manager import BlockManager, KvLease
from headway.kv.text_keys import TextKeys
from headway.runtime.engine.protocol import SubmitRequest


class CachedSlots(NamedTuple):
    """A cached prefix in the KV pool."""

    tokens: int
    slots: Sequence[tuple[int, int]]
    """Of these tokens, in order, as (first, count)."""


class SpanPrefixes:
    """Prefixes of prompts whose spans this instance computes, in the cache of its pool."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager, self._cache = block_manager, block_manager.cache

    @contextmanager
    def held(self, admit: SubmitRequest, prompt: memoryview, tokens: int, beside: int) -> Iterator[CachedSlots]:
        """Keep what is cached of a prompt's first `tokens` tokens from eviction within the `with` block: nothing where
        `beside` tokens, the copy's, have no room then."""
        if self._cache is None or not admit.prefix_cache:
            yield CachedSlots(0, ())
            return
        size = self._block_manager.block_tokens
        tip = self._cache.hold(self._keys(admit, prompt)[: tokens // size])
        if self._block_manager.free_blocks < self._block_manager.blocks_for(beside):
            self._cache.end(tip)
            tip = self._cache.hold(())
        self._cache.looked_up(known_tokens(admit), tip.depth)
        try:
            runs = self._cache.index.runs(tip)
            yield CachedSlots(tip.depth * size, [(first * size, count * size) for first, count in runs])
        finally:
            self._cache.end(tip)

    def leave(self, admit: SubmitRequest, prompt: memoryview, lease: KvLease) -> None:
        """Let the blocks of a lease, which has a prompt's KV in the order of its tokens, stay cached once it is
        freed."""
        if self._cache is None or not admit.prefix_cache:
            return
        name, known = lease.request, known_tokens(admit)
        self._cache.register(name, self._keys(admit, prompt), known, brings_kv=True)
        self._block_manager.join_cache(lease)
        self._block_manager.note_computed(name, known)
        self._cache.forget(name)

    def _keys(self, admit: SubmitRequest, prompt: memoryview) -> list[bytes]:
        text = TextKeys(prompt, self._block_manager.block_tokens, admit.cache_salt)
        for token in admit.output:
            text.append(token)
        return text.keys


def known_tokens(admit: SubmitRequest) -> int:
    """Return the tokens of a request's prompt and of the output that it came with."""
    return admit.prompt_tokens + len(admit.output)
