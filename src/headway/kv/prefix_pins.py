"""Pinned prefixes: cached KV of named texts that is kept from eviction, such as that of prepared documents."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from headway.kv.prefix_index import PrefixIndex, PrefixNode


class PrefixPins:
    """Pins on the prefixes of one index."""

    def __init__(self, index: PrefixIndex, changed: Callable[[], None]) -> None:
        """changed: called when a pin has changed which blocks are in use."""
        self._index, self._changed = index, changed
        # Ends of pinned prefixes, oldest pin first.
        self._tips: dict[str, PrefixNode] = {}

    @property
    def blocks(self) -> dict[str, int]:
        """Blocks of each pinned prefix, oldest pin first; blocks that several share count in each."""
        return {name: tip.depth for name, tip in self._tips.items()}

    def pin(self, name: str, keys: Sequence[Hashable]) -> int:
        """Keep the cached prefix of a text from eviction until `unpin`. Return how many of its blocks are cached."""
        tip = self._tips[name] = self._index.match(keys)
        self._changed()
        self._index.acquire(tip)
        return tip.depth

    def unpin(self, name: str) -> bool:
        """Let a pinned prefix be evicted. False: there is none of this name."""
        tip = self._tips.pop(name, None)
        if tip is None:
            return False
        self._changed()
        self._index.release(tip)
        return True
