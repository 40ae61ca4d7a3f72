"""KV accounting of one group: reserve, lease, grow, free, and a `check()` of all of it. KV shards of long requests
(KVP) are leases of other groups' block managers.

A scheduler reserves here before it commits a batch; executors replay the operations. With a `PrefixCache`, blocks of
requests that ended stay in the pool until room is needed, and requests with the same prefix share them by reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from headway.core.batch import KvOp, KvVerb
from headway.core.errors import ConfigError, InvariantError
from headway.kv.allocator import BlockTables, Run, joined_runs, without_runs
from headway.kv.prefix_cache import PrefixCache
from headway.kv.prefix_index import PrefixNode

_ALWAYS = 1 << 62
_EVICTED_TOGETHER = 16
"""Least blocks to evict where free ones lie scattered."""


class KvLease:
    """A request's right to KV blocks. Created and changed by `BlockManager` only."""

    __slots__ = ("blocks", "cached_tokens", "request", "tip", "tokens")

    def __init__(self, request: str, tip: PrefixNode | None = None, cached_tokens: int = 0) -> None:
        self.request = request
        self.blocks = 0
        # Capacity: blocks times tokens of a block.
        self.tokens = 0
        # The last of its blocks in the prefix index; None: it takes part in no sharing.
        self.tip = tip
        # Tokens of the prefix that it took from the cache when it was reserved.
        self.cached_tokens = cached_tokens


RESERVE_TOKENS = 1024
"""KV that a request reserves beyond what is known, tokens, and grows by on demand."""
_RESERVED_PART = 64
"""At most this part of a pool is reserved so by one request."""


class BlockManager:
    """Leases on a pool of blocks of `block_tokens` tokens. Every change is also kept as a `KvOp` until `drain_ops`."""

    def __init__(
        self, total_tokens: int, block_tokens: int, cache: PrefixCache | None = None, spare_blocks: int = 0
    ) -> None:
        """`spare_blocks`: beside the pool, for cached KV that no request uses: simulations of larger caches have them.

        Raises ConfigError for a pool of less than a block."""
        if block_tokens < 1 or total_tokens < block_tokens:
            raise ConfigError(
                f"a KV pool of {total_tokens} tokens cannot be cut into blocks of {block_tokens}: "
                "give more memory to the KV cache or make blocks smaller"
            )
        self.block_tokens = block_tokens
        # A partial block at the end is not used.
        self.n_blocks = total_tokens // block_tokens
        self.cache = cache
        # Without a cache a request needs the same blocks as long as it has none (`KvPool`).
        self.answers_hold = _ALWAYS if cache is None else 0
        # A usual answer never asks for more. In a small pool so much for each of many would keep prompts out.
        self.reserve_tokens = min(RESERVE_TOKENS, self.total_tokens // _RESERVED_PART)
        self._spare_blocks = spare_blocks
        self._tables = BlockTables(self.n_blocks + spare_blocks)
        self._leases: dict[str, KvLease] = {}
        # Changes since the last batch, in order.
        self._ops: list[KvOp] = []

    @property
    def total_tokens(self) -> int:
        return self.n_blocks * self.block_tokens

    @property
    def free_blocks(self) -> int:
        """Blocks that no request uses; cached ones are evicted when they are needed."""
        free = self._tables.allocator.free_blocks - self._spare_blocks
        return free if self.cache is None else free + self.cache.index.evictable

    @property
    def cached_tokens(self) -> int:
        """Tokens of cached blocks that no request uses."""
        return 0 if self.cache is None else self.cache.index.evictable * self.block_tokens

    @property
    def used_tokens(self) -> int:
        """Capacity of all leased blocks, in tokens."""
        return (self.n_blocks - self.free_blocks) * self.block_tokens

    def __contains__(self, request: str) -> bool:
        """Whether a request has a lease."""
        return request in self._leases

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens, rounded up."""
        return -(-tokens // self.block_tokens)

    def needed_blocks(self, request: str, tokens: int) -> int:
        """Return how many free blocks a request needs beyond its lease, for `tokens` tokens in all."""
        lease = self._leases.get(request)
        if lease is None:
            return -(-tokens // self.block_tokens) - (0 if self.cache is None else self.cache.in_use(request))
        return -(-tokens // self.block_tokens) - lease.blocks

    def held_blocks(self, request: str) -> int:
        """Return how many blocks a request's lease has; 0 without a lease."""
        lease = self._leases.get(request)
        return lease.blocks if lease is not None else 0

    def lease(self, request: str) -> KvLease:
        """Return the lease of a request. Raises KeyError without one."""
        return self._leases[request]

    def pledge(self, request: str, tokens: int, headroom_blocks: int = 0) -> bool:
        """Reserve a lease for the iteration policy (`policy.iteration.admission.KvPool`)."""
        return self.reserve(request, tokens, headroom_blocks) is not None

    def reserve(self, request: str, tokens: int, headroom_blocks: int = 0, start: int = 0) -> KvLease | None:
        """Return a new lease for at least `tokens` tokens, from token `start` of the request on.

        None, and no change, if that would leave fewer than `headroom_blocks` free. Raises InvariantError when the
        request has a lease."""
        if request in self._leases:
            raise InvariantError(f"request {request} has a lease already")
        blocks = self.blocks_for(max(tokens, 1))
        # Hold the hit first: making room must not evict it.
        tip = self.cache.begin(request) if self.cache is not None else None
        shared = tip.depth if tip is not None else 0
        if blocks - shared + headroom_blocks > self.free_blocks:
            if self.cache is not None and tip is not None:
                self.cache.cancel(request)
            return None
        if self.cache is not None and tip is not None:
            self.cache.count(request)
        lease = KvLease(request, tip, shared * self.block_tokens)
        self._leases[request] = lease
        if self.cache is not None and tip is not None and shared:
            runs = self.cache.shared_runs(request)
            self._tables.share(request, runs)
            self._ops.append(KvOp("share", request, shared, runs=runs))
            lease.blocks = shared
        self._add(lease, blocks - shared, "reserve", start)
        return lease

    def grow(self, lease: KvLease, tokens: int) -> bool:
        """Grow a lease to at least `tokens` tokens. False, and no change, if too few blocks are free."""
        self._own(lease)
        blocks = self.blocks_for(tokens) - lease.blocks
        if blocks <= 0:
            return True
        if blocks > self.free_blocks:
            return False
        self._add(lease, blocks, "grow")
        return True

    def free(self, lease: KvLease) -> None:
        """Free all blocks of a lease. No batch in flight may touch them."""
        self._own(lease)
        kept: tuple[Run, ...] = ()
        if self.cache is not None and lease.tip is not None:
            runs = self._tables.runs(lease.request)
            # Blocks of its own under keys that were cached already are not in the index.
            kept = tuple(without_runs(runs, without_runs(runs, self.cache.index.runs(lease.tip))))
            self.cache.end(lease.tip)
            lease.tip = None
        del self._leases[lease.request]
        self._tables.free(lease.request, kept)
        self._ops.append(KvOp("free", lease.request, 0, runs=kept))
        if self.cache is not None and self.cache.unused_blocks is not None:
            self._evict(self.cache.index.evictable - self.cache.unused_blocks)
        # Stale references to this lease must not appear to have room.
        lease.blocks = lease.tokens = 0

    def reassign(self, lease: KvLease, request: str) -> None:
        """Give a lease to another request. Raises InvariantError when that one has a lease."""
        self._own(lease)
        before = lease.request
        self._tables.reassign(before, request)
        del self._leases[before]
        self._leases[request] = lease
        lease.request = request
        self._ops.append(KvOp("reassign", request, 0, before=before))

    def where(self, request: str) -> tuple[Run, ...]:
        """Return the blocks of a request, as runs in the order of its tokens; none without a lease."""
        return self._tables.runs(request) if request in self._leases else ()

    def join_cache(self, lease: KvLease) -> None:
        """Let the blocks of a lease that came with its KV be cached as its request's, which is registered, computes."""
        if self.cache is not None and lease.tip is None:
            lease.tip = self.cache.begin(lease.request)

    @property
    def pending_ops(self) -> int:
        """Number of operations that no batch has carried yet."""
        return len(self._ops)

    def drain_ops(self) -> tuple[KvOp, ...]:
        """Return the operations since the last call, for the next batch to carry."""
        ops = tuple(self._ops)
        self._ops.clear()
        return ops

    def leases(self) -> Iterator[KvLease]:
        return iter(self._leases.values())

    # -- prefix cache -------------------------------------------------------------------------------------------

    def note_computed(self, request: str, tokens: int) -> None:
        """Cache the blocks of a request's first `tokens` tokens, which are in place: other requests may share them."""
        lease = self._leases.get(request)
        if self.cache is None or lease is None or lease.tip is None:
            return
        if tokens // self.block_tokens > lease.tip.depth:
            blocks = _numbers(self._tables.runs(lease.request), lease.tip.depth)
            lease.tip = self.cache.computed(request, lease.tip, tokens, blocks)

    def clear_cache(self) -> None:
        """Evict all cached blocks that no request uses, pinned ones too: their contents may be lost."""
        if self.cache is not None:
            for name in self.cache.pinned:
                self.cache.unpin(name)
            self._evict(self.cache.index.evictable)

    def check(self) -> None:
        """Raise InvariantError unless every block is free, leased or cached and all counts agree.

        Called when idle and by tests after every step.
        """
        if self.cache is None:
            self._tables.check()
        else:
            blocks = {lease: _numbers(self._tables.runs(lease.request)) for lease in self._leases.values()}
            _check_shared(self.n_blocks + self._spare_blocks, self._tables, self.cache, blocks)
        if set(self._tables.owners()) != set(self._leases):
            raise InvariantError("block owners and leases differ")
        for lease in self._leases.values():
            held = sum(count for _, count in self._tables.runs(lease.request))
            if held != lease.blocks or lease.tokens != held * self.block_tokens:
                raise InvariantError(f"the lease of {lease.request} says {lease.blocks} blocks and holds {held}")

    def _evict(self, blocks: int) -> None:
        """Evict so many cached blocks, which must be unused."""
        if self.cache is None or blocks <= 0:
            return
        numbers = [block for _ in range(blocks) if (block := self.cache.evict()) is not None]
        runs = joined_runs(sorted(numbers))
        self._tables.evict(runs)
        self._ops.append(KvOp("evict", "", 0, runs=runs))

    def _own(self, lease: KvLease) -> None:
        """Raise InvariantError unless the lease is current: a freed one must not touch a successor of the same name."""
        if self._leases.get(lease.request) is not lease:
            raise InvariantError(f"the lease of {lease.request} is not of this block manager, or was freed")

    def _add(self, lease: KvLease, blocks: int, verb: KvVerb, start: int = 0) -> None:
        """Allocate blocks to a lease and record the operation.

        Cached blocks are evicted to make room, and some more if the free ones lie scattered: each run costs attention
        a call."""
        if self.cache is not None and blocks:
            allocator, index = self._tables.allocator, self.cache.index
            self._evict(blocks - allocator.free_blocks)
            # The blocks should extend the lease's last run.
            end = sum(self._tables.runs(lease.request)[-1]) if lease.blocks else None
            # Prefixes are evicted from their ends, where their blocks lie side by side: a few more make a longer run.
            for _ in range(2):
                if index.evictable and not allocator.has_run(blocks, end):
                    self._evict(min(max(blocks, _EVICTED_TOGETHER), index.evictable))
        self._tables.add(lease.request, blocks)
        self._ops.append(KvOp(verb, lease.request, blocks, start))
        lease.blocks += blocks
        lease.tokens = lease.blocks * self.block_tokens


def _check_shared(n_blocks: int, tables: BlockTables, cache: PrefixCache, held: Mapping[KvLease, list[int]]) -> None:
    """Raise InvariantError unless blocks are free, or held by leases and cache; only cached ones by several.

    `held`: the blocks of each lease."""
    cache.check()
    tables.allocator.check()
    cached = {node.block for node in cache.index.nodes()}
    if len(cached) != len(cache.index):
        raise InvariantError("a block is cached under two prefixes")
    private: list[int] = []
    for lease, blocks in held.items():
        path = set(cache.index.path(lease.tip)) if lease.tip is not None else set()
        # Blocks of its own, cached prefixes of others excepted.
        private += [block for block in blocks if block not in path]
    free = [first + i for first, count in tables.allocator.free_runs() for i in range(count)]
    if len(private) + len(cached) + len(free) != n_blocks or len({*private, *cached, *free}) != n_blocks:
        raise InvariantError("a block has two owners, or is owned and free, or is neither")


def _numbers(runs: Iterable[Run], behind: int = 0) -> list[int]:
    """Return the blocks of runs one by one but for the first `behind`, in order of their tokens."""
    blocks: list[int] = []
    for first, count in runs:
        skipped = min(behind, count)
        behind -= skipped
        blocks += range(first + skipped, first + count)
    return blocks


# KV shards of long requests in groups that no longer compute their rows (Medha §3.3, KVP).
#
# A request starts in one group. When its share there is full, another group takes over its rows and begins a new shard;
# shards are in order, adjacent, and never change afterwards. Each is a lease of its group's block manager.


class KvShardLease(NamedTuple):
    """Tokens [start, start + tokens) of a request, leased from the block manager of `group`."""

    group: int
    block_manager: BlockManager
    lease: KvLease
    start: int
    tokens: int
