"""KV accounting of one group: reserve → lease → grow → free, and `check()`.

A scheduler reserves here before it commits a batch; executors replay the operations. Sharing of blocks between requests
(prefix reuse) is not here yet.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.batch import KvOp, KvVerb
from headway.core.errors import ConfigError, InvariantError
from headway.kv.block_allocator import BlockTables, Run


class KvLease:
    """A request's right to KV blocks. Created and changed by `BlockManager` only."""

    __slots__ = ("blocks", "request", "tokens")

    def __init__(self, request: str) -> None:
        self.request = request
        self.blocks = 0
        # Capacity: blocks times tokens of a block.
        self.tokens = 0


class BlockManager:
    """Leases on a pool of blocks of `block_tokens` tokens. Every change is also kept as a `KvOp` until `drain_ops`."""

    def __init__(self, total_tokens: int, block_tokens: int) -> None:
        if block_tokens < 1 or total_tokens < block_tokens:
            raise ConfigError(
                f"a KV pool of {total_tokens} tokens cannot be cut into blocks of {block_tokens}: "
                "give more memory to the KV cache or make blocks smaller"
            )
        self.block_tokens = block_tokens
        # A partial block at the end is not used.
        self.n_blocks = total_tokens // block_tokens
        self._tables = BlockTables(self.n_blocks)
        self._leases: dict[str, KvLease] = {}
        # Changes since the last batch, in order.
        self._ops: list[KvOp] = []

    @property
    def total_tokens(self) -> int:
        return self.n_blocks * self.block_tokens

    @property
    def free_blocks(self) -> int:
        return self._tables.allocator.free_blocks

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
        """Return how many blocks a request needs beyond its lease, for `tokens` tokens in all."""
        lease = self._leases.get(request)
        return -(-tokens // self.block_tokens) - (lease.blocks if lease is not None else 0)

    def held_blocks(self, request: str) -> int:
        """Return how many blocks a request's lease has; 0 without a lease."""
        lease = self._leases.get(request)
        return lease.blocks if lease is not None else 0

    def lease(self, request: str) -> KvLease:
        """Return the lease of a request. Raises KeyError without one."""
        return self._leases[request]

    def pledge(self, request: str, tokens: int, headroom_blocks: int = 0) -> bool:
        """Reserve a lease for the iteration policy (`policy.iteration.kv_pool.KvPool`)."""
        return self.reserve(request, tokens, headroom_blocks) is not None

    def reserve(self, request: str, tokens: int, headroom_blocks: int = 0, start: int = 0) -> KvLease | None:
        """Return a new lease for at least `tokens` tokens, from token `start` of the request on.

        None, and no change, if that would leave fewer than `headroom_blocks` free. Raises InvariantError when the
        request has a lease."""
        if request in self._leases:
            raise InvariantError(f"request {request} has a lease already")
        blocks = self.blocks_for(max(tokens, 1))
        if blocks + headroom_blocks > self.free_blocks:
            return None
        lease = KvLease(request)
        self._leases[request] = lease
        self._add(lease, blocks, "reserve", start)
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
        del self._leases[lease.request]
        self._tables.free(lease.request)
        self._ops.append(KvOp("free", lease.request, 0))
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

    @property
    def pending_ops(self) -> int:
        """Number of operations that no batch has carried yet."""
        return len(self._ops)

    def drain_ops(self) -> tuple[KvOp, ...]:
        """Return the operations since the last call, for the next batch to carry."""
        ops = tuple(self._ops)
        self._ops.clear()
        return ops

    def runs(self, lease: KvLease) -> tuple[Run, ...]:
        return self._tables.runs(lease.request)

    def leases(self) -> Iterator[KvLease]:
        return iter(self._leases.values())

    def check(self) -> None:
        """Raise InvariantError unless every block is free or leased exactly once and all counts agree.

        Called when idle and by tests after every step.
        """
        self._tables.check()
        if set(self._tables.owners()) != set(self._leases):
            raise InvariantError("block owners and leases differ")
        for lease in self._leases.values():
            held = sum(count for _, count in self._tables.runs(lease.request))
            if held != lease.blocks or lease.tokens != held * self.block_tokens:
                raise InvariantError(f"the lease of {lease.request} says {lease.blocks} blocks and holds {held}")

    def _own(self, lease: KvLease) -> None:
        """Raise InvariantError unless the lease is current: a freed one must not touch a successor of the same name."""
        if self._leases.get(lease.request) is not lease:
            raise InvariantError(f"the lease of {lease.request} is not of this block manager, or was freed")

    def _add(self, lease: KvLease, blocks: int, verb: KvVerb, start: int = 0) -> None:
        """Allocate blocks to a lease and record the operation."""
        self._tables.add(lease.request, blocks)
        self._ops.append(KvOp(verb, lease.request, blocks, start))
        lease.blocks += blocks
        lease.tokens = lease.blocks * self.block_tokens
