"""The invariants of one group's scheduler, checked as a whole: slow, for idle moments and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.errors import InvariantError

if TYPE_CHECKING:
    from headway.policy.iteration.scheduler import Scheduler


def audit(scheduler: Scheduler, guests: frozenset[str] = frozenset()) -> None:
    """Raise InvariantError unless cursors, sets and the ledger agree. `guests` have a shard here only."""
    ledger, sequences = scheduler.ledger, scheduler._sequences
    ledger.check()
    sets = (scheduler.ready, *(flight.decodes for flight in scheduler._flights.values()))
    for group in sets:
        group.settle_all()
    leased = {s.request.id for s in sequences.values() if s.lease is not None}
    kept = set(scheduler.custody.names())
    if (
        leased | guests | kept != {lease.request for lease in ledger.leases()}
        or leased != scheduler.policy.holders.keys()
    ):
        raise InvariantError("sequences, custody and ledger disagree on who holds KV")
    if kept & (leased | guests):
        raise InvariantError(f"KV of {min(kept & (leased | guests))} is in custody and has an owner")
    for sequence in sequences.values():
        landed = sequence.in_flight or sequence.base <= sequence.computed  # else chunks of its last shard are flying
        if not (sequence.computed <= sequence.scheduled <= sequence.known and landed):
            raise InvariantError(f"cursors of {sequence.request.id} are out of order")
        if sequence.lease is not None and sequence.scheduled - sequence.base > sequence.lease.tokens:
            raise InvariantError(f"{sequence.request.id} has been scheduled beyond its lease")
    homes = [*(s.request.id for s in scheduler.policy.queue), *scheduler._parked, *scheduler.ready.members]
    homes += [name for flight in scheduler._flights.values() for name in flight.decodes.members]
    landing = {
        chunk.request
        for flight in scheduler._flights.values()
        for chunk, sequence in zip(flight.chunks, flight.carried, strict=True)
        if (chunk.last or sequence.aborted) and sequences.get(chunk.request) is sequence
    }
    homes += landing | {name for name, s in scheduler._aborting.items() if s.in_flight}
    if len(homes) != len(set(homes)) or set(homes) != set(sequences):
        raise InvariantError("a request is nowhere, or in two places at once")
    for group in sets:
        if group.kv_sum != sum(s.computed + 1 - s.base for s in group.members.values()):
            raise InvariantError("a decode group's KV sum is off")
