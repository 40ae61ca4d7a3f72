"""Check of all invariants of one group's scheduler. O(all requests): for idle moments and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.errors import InvariantError

if TYPE_CHECKING:
    from headway.policy.iteration.group_state import GroupState


def audit(state: GroupState, remote: frozenset[str] = frozenset()) -> None:
    """Raise InvariantError unless cursors, sets and the block manager agree.

    `remote`: requests that have a shard in this group and whose rows another group computes."""
    block_manager, sequences = state.block_manager, state.sequences
    block_manager.check()
    sets = (state.ready, *(batch.decodes for batch in state.in_flight.values()))
    for group in sets:
        group.settle_all()
    # Every lease has exactly one owner: a sequence, a remote shard, or staged KV.
    leased = {s.request.id for s in sequences.values() if s.lease is not None}
    kept = set(state.staged_kv.names())
    if (
        leased | remote | kept != {lease.request for lease in block_manager.leases()}
        or leased != state.policy.holders.keys()
    ):
        raise InvariantError("sequences, staged KV and blocks disagree on which requests hold KV")
    if kept & (leased | remote):
        raise InvariantError(f"KV of {min(kept & (leased | remote))} is staged and has an owner")
    for sequence in sequences.values():
        # `computed` is below `base` only while chunks of the previous shard are in flight.
        landed = sequence.in_flight or sequence.base <= sequence.computed
        if not (sequence.computed <= sequence.scheduled <= sequence.known and landed):
            raise InvariantError(f"cursors of {sequence.request.id} are out of order")
        if sequence.lease is not None and sequence.scheduled - sequence.base > sequence.lease.tokens:
            raise InvariantError(f"{sequence.request.id} has been scheduled beyond its lease")
    # Each sequence is in exactly one place: a set, the queue, or in flight without being in the queue.
    homes = [*(s.request.id for s in state.policy.queue), *state.waiting_for_kv, *state.ready.members]
    homes += [name for batch in state.in_flight.values() for name in batch.decodes.members]
    # In flight and in no other set: last chunks, and aborted requests, which `withdraw` has taken off the queue.
    landing = {
        chunk.request
        for batch in state.in_flight.values()
        for chunk, sequence in zip(batch.chunks, batch.sequences, strict=True)
        if (chunk.last or sequence.aborted) and sequences.get(chunk.request) is sequence
    }
    homes += landing | {name for name, s in state.aborting.items() if s.in_flight}
    if len(homes) != len(set(homes)) or set(homes) != set(sequences):
        raise InvariantError("a request is nowhere, or in two places at once")
    for group in sets:
        if group.kv_sum != sum(s.computed + 1 - s.base for s in group.members.values()):
            raise InvariantError("a decode group's KV sum is off")
