"""KV outside of schedulers on simulated instances: of spans, and of requests on their way to where they decode.

It takes blocks of the pool of its instance's engine: the scheduler there has as many fewer. A span begins by the rules
of live clusters (`control.kv_admission`), but its patience has no end. A transfer reserves blocks for all KV on its
target when it is announced; its slices are sent when the target has them, as live ones are. A request that enters a
scheduler frees what it had outside, and is given blocks there anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from headway.control.kv_admission import KvAdmission, kv_needs, span_members
from headway.control.kv_reservations import KvClaim, KvReservations, gives_way
from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.kv.block_manager import BlockManager, KvLease


class SimulatedKvRoom:
    """Blocks outside of schedulers, and what waits for them."""

    def __init__(
        self,
        pool_of: Callable[[int], BlockManager],
        freed: Callable[[int], None],
        granted: Callable[[str, int], None] = lambda request, target: None,
    ) -> None:
        """pool_of: the blocks of an instance. freed: called with each instance whose blocks were freed. granted: with
        each request that waited for blocks on a target and has them now."""
        self._pool_of, self._freed, self._granted = pool_of, freed, granted
        self._leases: dict[str, dict[int, KvLease]] = {}
        # requests with a lease, by instance
        self._holders: dict[int, set[str]] = {}
        # transfers that wait for blocks: tokens by target and request, in order of announcement
        self._waiting: dict[int, dict[str, int]] = {}
        # targets on which each waiting request waits
        self._waits = Counter[str]()
        self._kv = KvReservations(self._load)
        self._admission = KvAdmission(self._kv, lambda: 0.0, math.inf)
        # whether blocks were taken, or waited for, since `gives_way` was last asked
        self._taken = False
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
            self._holders.setdefault(number, set()).add(request)
            self._taken = True
        return lease is not None

    # -- transfers ----------------------------------------------------------------------------------------------------

    def announce(self, request: str, target: int, tokens: int) -> None:
        """Reserve blocks for all KV of a request on the target of a transfer, behind those that wait there."""
        waiting = self._waiting.setdefault(target, {})
        # more than the whole pool never fits: the scheduler will refuse it
        tokens = min(tokens, self._pool_of(target).total_tokens)
        if request not in waiting and (waiting or not self._take(request, target, tokens)):
            waiting[request] = tokens
            self._waits[request] += 1
            self.waited += 1
            self._taken = True

    def ready(self, kv_slice: KvSlice) -> bool:
        """Return whether a slice has its blocks (`InstanceBackend.ready`). Transfers to its target that wait get free
        blocks first, first come, first served."""
        waiting = self._waiting.get(kv_slice.target, {})
        while waiting:
            request, tokens = next(iter(waiting.items()))
            if not self._take(request, kv_slice.target, tokens):
                break
            del waiting[request]
            self._waits_less(request)
            self._granted(request, kv_slice.target)
        return kv_slice.request not in waiting

    def _waits_less(self, request: str) -> None:
        self._waits[request] -= 1
        if not self._waits[request]:
            del self._waits[request]

    def _may_deadlock(self) -> bool:
        """Return whether requests may wait for each other's blocks, which `gives_way` takes time to find out.

        A deadlock needs a waiting request that holds blocks where others wait, or that waits on two targets. Otherwise
        each target serves its queue in order."""
        turns = sum(map(len, self._waiting.values()))
        return turns > len(self._waits) or any(
            request in self._waits
            for number, waiting in self._waiting.items()
            if waiting
            for request in self._holders.get(number, ())
        )

    def gives_way(self, residents: Callable[[], Iterable[KvClaim]]) -> str | None:
        """Return the request that has to give up its blocks so that the others can go on (`control.kv_reservations`);
        None: all can. residents: claims of the requests in schedulers, in blocks."""
        # requests that give up or get what they wait for let no others wait for each other
        taken, self._taken = self._taken, False
        if not taken or not self._may_deadlock():
            return None
        needs: dict[str, dict[int, int]] = {}
        turns: dict[str, dict[int, int]] = {}
        for number, waiting in self._waiting.items():
            for turn, (request, tokens) in enumerate(waiting.items()):
                turns.setdefault(request, {})[number] = turn
                needs.setdefault(request, {})[number] = self._pool_of(number).blocks_for(tokens)
        held = {
            request: {number: self._pool_of(number).held_blocks(lease.request) for number, lease in leases.items()}
            for request, leases in self._leases.items()
        }
        outside = [
            KvClaim(name, held.get(name, {}), needs.get(name, {}), turns.get(name, {})) for name in {**held, **needs}
        ]
        found = gives_way([*residents(), *outside], lambda number: self._pool_of(number).n_blocks)
        self._taken = found is not None
        return None if found is None else found[0]

    # -- ends ---------------------------------------------------------------------------------------------------------

    def release(self, request: str) -> None:
        """Free all blocks of a request and withdraw what it waits for."""
        for number, lease in self._leases.pop(request, {}).items():
            self._pool_of(number).free(lease)
            self._holders[number].discard(request)
            self._freed(number)
        self._admission.forget(request)
        if self._waits.pop(request, 0):
            for waiting in self._waiting.values():
                waiting.pop(request, None)

    def spread(self, request: str, group: Iterable[int], tokens: int) -> None:
        """Keep the KV of a request that has left the scheduler of a group."""
        chosen = tuple(group)
        for number in chosen:
            self.hold(request, number, -(-tokens // len(chosen)))


def _name(request: str) -> str:
    # Not the request's own: its scheduler leases under that.
    return f"{request} outside"
