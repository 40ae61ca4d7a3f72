"""Named policies for the order in which cached KV blocks are evicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from typing_extensions import override

from headway.core.errors import ConfigError


class EvictionPolicy(Protocol):
    """Order of eviction. It reads no clock: time is the order of the calls."""

    name: str

    def stamp(self) -> float:
        """Return the mark of a block whose last user leaves now."""

    def rank(self, stamp: float, depth: int) -> float:
        """Return the rank of an unused leaf: the lowest is evicted first.

        `depth`: blocks from the start of the prompt to this one, itself included."""

    def evicted(self, rank: float) -> None:
        """Note that a block of this rank was evicted."""


class LeastRecentlyUsed(EvictionPolicy):
    """Evict the block that has been unused for longest."""

    name = "lru"

    def __init__(self) -> None:
        self._uses = 0

    @override
    def stamp(self) -> float:
        self._uses += 1
        return float(self._uses)

    @override
    def rank(self, stamp: float, depth: int) -> float:
        return stamp

    @override
    def evicted(self, rank: float) -> None:
        pass


class CostAware(EvictionPolicy):
    """Evict the block that is cheapest to compute again, discounted by how long it has been unused.

    GreedyDual (Young 1994; GreedyDual-Size, Cao and Irani, USITS 1997): a block's rank is the seconds that computing
    it again takes, plus the rank of the last evicted block when it was used last. All blocks have the same bytes, so
    seconds order them as seconds per byte do. Attention makes deeper blocks dearer.
    """

    name = "cost"

    def __init__(self, block_s: Callable[[int], float]) -> None:
        """`block_s`: seconds to compute the block that ends a prefix of so many blocks."""
        self._block_s = block_s
        # Rank of the last evicted block: what unused blocks have aged by.
        self._age = 0.0

    @override
    def stamp(self) -> float:
        return self._age

    @override
    def rank(self, stamp: float, depth: int) -> float:
        return stamp + self._block_s(depth)

    @override
    def evicted(self, rank: float) -> None:
        self._age = max(self._age, rank)


EVICTION_POLICIES = (LeastRecentlyUsed.name, CostAware.name)


def make_eviction(name: str, block_s: Callable[[int], float]) -> EvictionPolicy:
    """Return a new policy by name. Raises ConfigError, which lists the names."""
    if name == LeastRecentlyUsed.name:
        return LeastRecentlyUsed()
    if name == CostAware.name:
        return CostAware(block_s)
    raise ConfigError(f"unknown eviction policy {name!r}; known are {', '.join(EVICTION_POLICIES)}")
