"""KV blocks not owned by a scheduled request: blocks for KV that will arrive, KV of spans, KV of finished prefills.

Leases by name, and a queue of pending requests for blocks. The queue is served first come, first served, each request
whole or not at all: no partial allocation and no overtaking (Tetris §4.2 requires both of a receiver; its order is that
of the first handshake). Names that hold something already go first: what they hold is of no use without the rest. Then
spans: a waiting span keeps its whole group of instances from computing, and so from freeing blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headway.core.errors import InvariantError, RequestError
from headway.kv.block_manager import BlockManager, KvLease

_SPANS = "/spans"


def span_kv_name(request: str, task: int | None = None) -> str:
    """Return the name under which a request's KV is staged while spans of a group compute it.

    Such KV lies in the order of a layout. KV staged under the request's own id lies in the order of its tokens, and
    only that may be claimed by a scheduled request. Two names let an instance that computes spans receive the whole KV
    next to its own share. `task`: number of the task that gives the KV another layout, while both copies exist."""
    return request + _SPANS if task is None else f"{request}{_SPANS}/{task}"


def is_span_kv(name: str) -> bool:
    """Whether KV under this name is of spans (`span_kv_name`)."""
    return _SPANS in name


class _PendingRequest(NamedTuple):
    tokens: int
    """Capacity that the name needs in all."""
    since_s: float
    """When it was requested."""


class StagedKv:
    """Staged KV of one block manager, which keeps its operations in order with those of the scheduler."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager
        self._held: dict[str, KvLease] = {}
        # Pending requests by name, in order of arrival (dicts keep it).
        self._pending: dict[str, _PendingRequest] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def names(self) -> Iterator[str]:
        """Names under which KV is held."""
        return iter(self._held)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names that wait for blocks, in order of their requests."""
        return tuple(self._pending)

    def lease(self, name: str) -> KvLease | None:
        """Return the lease that is staged under a name, or None. It stays staged."""
        return self._held.get(name)

    def waits(self, name: str) -> bool:
        """Whether a name has requested blocks that `admit` has not given yet."""
        return name in self._pending

    def blocked(self, now: float, age_s: float) -> bool:
        """Whether a name has waited for `age_s` or longer: new requests should then take no KV before it."""
        return bool(self._pending) and now - min(pending.since_s for pending in self._pending.values()) >= age_s

    # -- blocks for KV that will arrive -------------------------------------------------------------------------

    def request(self, name: str, tokens: int, now: float) -> None:
        """Queue a request for blocks of `tokens` tokens, including what the name holds already. `admit` serves it.

        Raises RequestError when the pool could never hold that many, when the name waits already, and when a scheduled
        request holds KV under it."""
        if name in self._pending or (name in self._block_manager and name not in self._held):
            raise RequestError(f"{name} waits for room already, or is computed here", "id")
        if self._block_manager.blocks_for(tokens) > self._block_manager.n_blocks:
            raise RequestError(
                f"{tokens} tokens do not fit the KV cache of {self._block_manager.total_tokens}", "tokens"
            )
        self._pending[name] = _PendingRequest(tokens, now)

    def admit(self) -> list[str]:
        """Serve pending requests in order until one does not fit. Return the names that were served."""
        if not self._pending:
            return []
        granted: list[str] = []
        # The sort is stable: within a turn, first come, first served.
        for name in sorted(self._pending, key=self._turn):
            # Stop at the first that does not fit: a later, smaller one must not overtake it.
            if not self._give(name, self._pending[name].tokens):
                break
            del self._pending[name]
            granted.append(name)
        return granted

    def _turn(self, name: str) -> int:
        """Return the rank of a pending name: holders of some KV, then spans, then others."""
        return 0 if name in self._held else 1 if is_span_kv(name) else 2

    def _give(self, name: str, tokens: int) -> bool:
        """Grow or reserve the lease of a name. False: too few free blocks."""
        lease = self._held.get(name)
        if lease is not None:
            return self._block_manager.grow(lease, tokens)
        lease = self._block_manager.reserve(name, tokens)
        if lease is None:
            return False
        self._held[name] = lease
        return True

    # -- ownership ----------------------------------------------------------------------------------------------

    def store(self, lease: KvLease) -> None:
        """Stage the lease of a request that leaves the scheduler, under its own id."""
        if lease.request in self._held:
            raise InvariantError(f"{lease.request} has staged KV already")
        self._held[lease.request] = lease

    def claim(self, name: str) -> KvLease:
        """Return the lease staged under a name, to be owned by its scheduled request.

        Raises InvariantError if none is."""
        lease = self._held.pop(name, None)
        if lease is None:
            raise InvariantError(f"no KV is held for {name}")
        self._pending.pop(name, None)
        return lease

    def to_request(self, request: str) -> bool:
        """Move the KV that spans have left to the request's own id. False: nothing is staged for the request.

        If KV was received under that id already, the spans' copy is freed. Only for KV in the order of tokens."""
        name = span_kv_name(request)
        lease = self._held.get(name)
        if lease is not None and request not in self._held:
            self._pending.pop(name, None)
            del self._held[name]
            self._block_manager.reassign(lease, request)
            self._held[request] = lease
        else:
            self.release(name)
        return request in self._held

    def to_span(self, request: str) -> bool:
        """Move KV staged under the request's own id to its spans, the reverse of `to_request`.

        False, and no change: nothing is staged, or the spans hold something already."""
        name, lease = span_kv_name(request), self._held.get(request)
        if lease is None or name in self._held:
            return False
        self._pending.pop(request, None)
        del self._held[request]
        self._block_manager.reassign(lease, name)
        self._held[name] = lease
        return True

    def release(self, name: str) -> bool:
        """Free what is staged under a name and cancel its pending request. False: there was neither."""
        waited = self._pending.pop(name, None) is not None
        lease = self._held.pop(name, None)
        if lease is not None:
            self._block_manager.free(lease)
        return waited or lease is not None

    def lost(self) -> None:
        """Drop all staged KV and pending requests: the contents of the pool are lost."""
        for name in list(self._held):
            self.release(name)
        self._pending.clear()
