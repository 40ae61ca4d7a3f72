"""KV blocks not owned by a scheduled request: room for KV that will arrive, KV of spans, what a prefill leaves behind.

Leases by name, and a line of requests for room. The line is served in order of asking, each whole or not at all: none
holds part of what it needs, and none overtakes (Tetris §4.2 asks both of a receiver; the order there is that of the
first handshake). A name that holds something already and asks for more goes first: what it holds is of no use until it
has the rest. Then spans: one that waits keeps its whole group from computing, and so those that will free blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headway.core.errors import InvariantError, RequestError
from headway.kv.block_manager import BlockManager, KvLease

_RUNS = "/runs"


def runs_of(request: str) -> str:
    """The name under which a request's KV is staged while spans of a group compute it.

    Such KV lies in the order of a layout. What is kept under the request's own id lies in the order of its tokens, and
    only that may become a scheduled request's. An instance that computes spans may so receive the whole beside its
    share."""
    return request + _RUNS


class _PendingRequest(NamedTuple):
    tokens: int
    since_s: float


class StagedKv:
    """Of one ledger. Its operations are kept by the ledger, in order with those of the scheduler."""

    def __init__(self, ledger: BlockManager) -> None:
        self._ledger = ledger
        self._held: dict[str, KvLease] = {}
        self._line: dict[str, _PendingRequest] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def names(self) -> Iterator[str]:
        """Names under which KV is held."""
        return iter(self._held)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names that wait for room, in order of asking."""
        return tuple(self._line)

    def lease(self, name: str) -> KvLease | None:
        """What is held under a name; None: nothing. It stays staged."""
        return self._held.get(name)

    def waits(self, name: str) -> bool:
        """Whether a name has requested room and has not got it."""
        return name in self._line

    def blocked(self, now: float, age_s: float) -> bool:
        """Whether a name has waited for longer than `age_s`: no new request should then take KV before it does."""
        return bool(self._line) and now - min(ask.since_s for ask in self._line.values()) >= age_s

    # -- room ---------------------------------------------------------------------------------------------------

    def request(self, name: str, tokens: int, now: float) -> None:
        """Wait for room for `tokens` tokens, or for that many in all where something is held already. `admit` gives it.

        Raises RequestError when the pool could never hold that many, when the name waits already, and when a sequence
        holds KV under it."""
        if name in self._line or (name in self._ledger and name not in self._held):
            raise RequestError(f"{name} waits for room already, or is computed here", "id")
        if self._ledger.blocks_for(tokens) > self._ledger.n_blocks:
            raise RequestError(f"{tokens} tokens do not fit the KV cache of {self._ledger.total_tokens}", "tokens")
        self._line[name] = _PendingRequest(tokens, now)

    def admit(self) -> list[str]:
        """Give room to the names that wait, in order, until one does not fit. Returns those that have got it."""
        if not self._line:
            return []
        granted: list[str] = []
        for name in sorted(self._line, key=self._turn):  # stable: first comers stay first
            if not self._give(name, self._line[name].tokens):
                break
            del self._line[name]
            granted.append(name)
        return granted

    def _turn(self, name: str) -> int:
        return 0 if name in self._held else 1 if _RUNS in name else 2

    def _give(self, name: str, tokens: int) -> bool:
        lease = self._held.get(name)
        if lease is not None:
            return self._ledger.grow(lease, tokens)
        lease = self._ledger.reserve(name, tokens)
        if lease is None:
            return False
        self._held[name] = lease
        return True

    # -- who has what -------------------------------------------------------------------------------------------

    def store(self, lease: KvLease) -> None:
        """Keep the KV that a scheduled request leaves behind, under its own name."""
        if lease.request in self._held:
            raise InvariantError(f"{lease.request} has KV in custody already")
        self._held[lease.request] = lease

    def claim(self, name: str) -> KvLease:
        """Hand what is held under a name to its scheduled request. Raises InvariantError when nothing is."""
        lease = self._held.pop(name, None)
        if lease is None:
            raise InvariantError(f"no KV is held for {name}")
        self._line.pop(name, None)
        return lease

    def to_request(self, request: str) -> bool:
        """Hand what spans have left to the request, unless it has received its KV already: then give it back. Only for
        KV in the order of tokens. False: nothing is held for the request."""
        name = runs_of(request)
        lease = self._held.get(name)
        if lease is not None and request not in self._held:
            self._line.pop(name, None)
            del self._held[name]
            self._ledger.reassign(lease, request)
            self._held[request] = lease
        else:
            self.release(name)
        return request in self._held

    def to_span(self, request: str) -> bool:
        """The reverse of `to_request`: hand what is held under the request's own name to its spans. False: nothing is,
        or spans have something already."""
        name, lease = runs_of(request), self._held.get(request)
        if lease is None or name in self._held:
            return False
        self._line.pop(request, None)
        del self._held[request]
        self._ledger.reassign(lease, name)
        self._held[name] = lease
        return True

    def release(self, name: str) -> bool:
        """Free what is held under a name, and take it out of the line. False: neither was so."""
        waited = self._line.pop(name, None) is not None
        lease = self._held.pop(name, None)
        if lease is not None:
            self._ledger.free(lease)
        return waited or lease is not None

    def lost(self) -> None:
        """Drop all that is held and all that waits: the contents of the pool are gone."""
        for name in list(self._held):
            self.release(name)
        self._line.clear()
