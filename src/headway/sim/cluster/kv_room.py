"""KV outside of schedulers on simulated instances: of spans, and of requests on their way to where they decode.

It takes blocks of the pool of its instance's engine: the scheduler there has as many fewer. A span begins by the rules
of live clusters (`control.kv_admission`), but its patience has no end. A transfer reserves blocks for all KV on
its target when it is announced; its slices wait at their senders until the target has them, as live ones do. A request
that enters a scheduler frees what it had outside, and is given blocks there anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from headway.control.kv_admission import KvAdmission, kv_needs, span_members
from headway.control.kv_reservations import KvReservations
from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.kv.block_manager import BlockManager, KvLease


class SimulatedKvRoom:
    """Blocks outside of schedulers, and what waits for them."""

    def __init__(self, pool_of: Callable[[int], BlockManager], freed: Callable[[int], None]) -> None:
        """pool_of: the blocks of an instance. freed: called with each instance whose blocks were freed."""
        self._pool_of, self._freed = pool_of, freed
        self._leases: dict[str, dict[int, KvLease]] = {}
        # transfers that wait for blocks: tokens by target and request, in order of announcement
        self._waiting: dict[int, dict[str, int]] = {}
        self._parked: dict[tuple[int, str], list[KvSlice]] = {}
        self._kv = KvReservations(self._load)
        self._admission = KvAdmission(self._kv, lambda: 0.0, math.inf)
        self.waited = 0
        """Transfers that did not have blocks at once."""

    def _load(self, number: int) -> tuple[int, int]:
        pool = self._pool_of(number)
        return pool.total_tokens, pool.used_tokens

    # -- spans --------------------------------------------------------------------------------------------------------

    def fits(self, entry: SpanEntry) -> bool:
        """Return whether a span may begin (`InstanceBackend.fits`)."""
        return self._admission.fits(entry)

    def begin(self, entry: SpanEntry) -> None:
        """Take the blocks of a span that begins, and of the members of its batch: for their whole prompts."""
        self._admission.begun(entry)
        for member in span_members(entry):
            self._kv.forget(member.owner)
            for number, tokens in kv_needs(member).items():
                self.hold(member.owner, number, tokens)

    def hold(self, request: str, number: int, tokens: int) -> None:
        """Take blocks for so many tokens of a request, or as many as are free: on an empty pool that is too small, and
        where the batch of a decode that moves has not ended."""
        pool = self._pool_of(number)
        free = pool.free_blocks + pool.held_blocks(_name(request))
        self._take(request, number, min(tokens, free * pool.block_tokens))

    def _take(self, request: str, number: int, tokens: int) -> bool:
        """Return whether a request has blocks for so many tokens now. No change if it has not."""
        held, pool = self._leases.setdefault(request, {}), self._pool_of(number)
        if number in held:
            return pool.grow(held[number], tokens)
        lease = pool.reserve(_name(request), tokens) if tokens else None
        if lease is not None:
            held[number] = lease
        return lease is not None

    # -- transfers ----------------------------------------------------------------------------------------------------

    def announce(self, request: str, target: int, tokens: int) -> None:
        """Reserve blocks for all KV of a request on the target of a transfer, behind those that wait there."""
        waiting = self._waiting.setdefault(target, {})
        # more than the whole pool never fits: the scheduler will refuse it
        tokens = min(tokens, self._pool_of(target).total_tokens)
        if request not in waiting and (waiting or not self._take(request, target, tokens)):
            waiting[request] = tokens
            self.waited += 1

    def park(self, kv_slice: KvSlice) -> bool:
        """Return whether a slice has to wait for blocks; `grant` returns it later."""
        key = kv_slice.target, kv_slice.request
        if key[1] not in self._waiting.get(key[0], ()):
            return False
        self._parked.setdefault(key, []).append(kv_slice)
        return True

    def grant(self) -> list[KvSlice]:
        """Give free blocks to transfers that wait, first come, first served; return their parked slices."""
        found: list[KvSlice] = []
        for target, waiting in self._waiting.items():
            while waiting:
                request, tokens = next(iter(waiting.items()))
                if not self._take(request, target, tokens):
                    break
                del waiting[request]
                found += self._parked.pop((target, request), ())
        return found

    def blocked(self) -> str | None:
        """Return the request that was the last to wait for blocks; None: none waits."""
        names = [request for waiting in self._waiting.values() for request in waiting]
        return names[-1] if names else None

    # -- ends ---------------------------------------------------------------------------------------------------------

    def release(self, request: str) -> list[KvSlice]:
        """Free all blocks of a request and withdraw what it waits for; return its parked slices."""
        for number, lease in self._leases.pop(request, {}).items():
            self._pool_of(number).free(lease)
            self._freed(number)
        self._admission.forget(request)
        for waiting in self._waiting.values():
            waiting.pop(request, None)
        keys = [key for key in self._parked if key[1] == request]
        return [kv_slice for key in keys for kv_slice in self._parked.pop(key)]

    def spread(self, request: str, group: Iterable[int], tokens: int) -> None:
        """Keep the KV of a request that has left the scheduler of a group."""
        chosen = tuple(group)
        for number in chosen:
            self.hold(request, number, -(-tokens // len(chosen)))


def _name(request: str) -> str:
    # Not the request's own: its scheduler leases under that.
    return f"{request} outside"
