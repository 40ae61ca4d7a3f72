"""The only owner of an instance's KV accounting: reserve → lease → grow → free, and `check()`.

A scheduler asks it before it commits; executors replay its operations. Sharing of blocks between requests (prefix
reuse) is not here yet.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.batch import KvOp, KvVerb
from headway.core.errors import ConfigError, InvariantError
from headway.kv.block_allocator import BlockTables, Run


class KvLease:
    """A request's right to KV blocks. `tokens` is how many tokens fit. Made and changed by its ledger only."""

    __slots__ = ("blocks", "request", "tokens")

    def __init__(self, request: str) -> None:
        self.request = request
        self.blocks = 0
        self.tokens = 0


class BlockManager:
    """Blocks of `block_tokens` tokens. Every change is also kept as a `KvOp` until `drain_ops`."""

    def __init__(self, total_tokens: int, block_tokens: int) -> None:
        if block_tokens < 1 or total_tokens < block_tokens:
            raise ConfigError(
                f"a KV pool of {total_tokens} tokens cannot be cut into blocks of {block_tokens}: "
                "give more memory to the KV cache or make blocks smaller"
            )
        self.block_tokens = block_tokens
        self.n_blocks = total_tokens // block_tokens
        self._tables = BlockTables(self.n_blocks)
        self._leases: dict[str, KvLease] = {}
        self._ops: list[KvOp] = []

    @property
    def total_tokens(self) -> int:
        return self.n_blocks * self.block_tokens

    @property
    def free_blocks(self) -> int:
        return self._tables.allocator.free_blocks

    @property
    def used_tokens(self) -> int:
        """Tokens' worth of blocks that are leased."""
        return (self.n_blocks - self.free_blocks) * self.block_tokens

    def __contains__(self, request: str) -> bool:
        """Whether a request has a lease."""
        return request in self._leases

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def needed_blocks(self, request: str, tokens: int) -> int:
        """Free blocks that a request would take, beside those of its lease, for `tokens` tokens in all."""
        lease = self._leases.get(request)
        return -(-tokens // self.block_tokens) - (lease.blocks if lease is not None else 0)

    def held_blocks(self, request: str) -> int:
        """Blocks of a request's lease; 0: it has none."""
        lease = self._leases.get(request)
        return lease.blocks if lease is not None else 0

    def lease(self, request: str) -> KvLease:
        """The lease of a request that has one."""
        return self._leases[request]

    def pledge(self, request: str, tokens: int, headroom_blocks: int = 0) -> bool:
        """`reserve` as the iteration policy asks for it (`policy.iteration.kv_pool`)."""
        return self.reserve(request, tokens, headroom_blocks) is not None

    def reserve(self, request: str, tokens: int, headroom_blocks: int = 0, start: int = 0) -> KvLease | None:
        """A lease for at least `tokens` tokens from token `start` of the request on, or None (and no change) when that
        would leave fewer than `headroom_blocks` free. Raises InvariantError when the request has a lease."""
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
        """Make the lease hold at least `tokens` tokens. False, and no change, when the pool cannot give that."""
        self._own(lease)
        blocks = self.blocks_for(tokens) - lease.blocks
        if blocks <= 0:
            return True
        if blocks > self.free_blocks:
            return False
        self._add(lease, blocks, "grow")
        return True

    def free(self, lease: KvLease) -> None:
        """Give everything back. The caller knows that no batch in flight touches it."""
        self._own(lease)
        del self._leases[lease.request]
        self._tables.free(lease.request)
        self._ops.append(KvOp("free", lease.request, 0))
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
        """The blocks of a request, as runs in the order of its tokens; none without a lease."""
        return self._tables.runs(request) if request in self._leases else ()

    @property
    def pending_ops(self) -> int:
        """How many operations no batch has carried yet."""
        return len(self._ops)

    def drain_ops(self) -> tuple[KvOp, ...]:
        """The operations since the last call, for the next batch to carry."""
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
        if self._leases.get(lease.request) is not lease:
            raise InvariantError(f"the lease of {lease.request} is not of this ledger, or was freed")

    def _add(self, lease: KvLease, blocks: int, verb: KvVerb, start: int = 0) -> None:
        self._tables.add(lease.request, blocks)
        self._ops.append(KvOp(verb, lease.request, blocks, start))
        lease.blocks += blocks
        lease.tokens = lease.blocks * self.block_tokens
