"""Apply a batch's completion, an abort, a staging or a loss of KV to the requests of one group."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from headway.core.batch import RequestProgress
from headway.core.errors import InvariantError
from headway.core.events import RequestEvent
from headway.policy.iteration.decodes import DecodeSet
from headway.policy.iteration.group_state import BatchInFlight, GroupState
from headway.policy.iteration.sequence import SequenceState


class BatchCompletion:
    """State changes of one group after a batch. Methods return events, in the order in which they became true."""

    def __init__(self, state: GroupState) -> None:
        self._state = state

    def complete(
        self, batch_id: int, results: Seq[RequestProgress], now: float, elapsed_s: float | None, repeats: int
    ) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self._state
        batch = state.in_flight.pop(batch_id, None)
        if batch is None:
            raise InvariantError(f"batch {batch_id} is not in flight")
        if not 1 <= repeats <= batch.repeat:
            raise InvariantError(f"batch {batch_id} may run {batch.repeat} times, not {repeats}")
        if elapsed_s is not None:
            state.policy.observed(batch.load, elapsed_s)
        state.policy.ended_iteration(now)
        if repeats > 1:
            # `commit` has counted the first.
            state.count_iterations(repeats - 1)
        events = state.drain_events()
        decodes = batch.decodes
        if decodes.members:
            # Step the set before any member leaves it: those that end or leave have computed this token too.
            decodes.step(repeats)
        prefilled = self._advance_prefills(batch, now, events)
        ended = self._ended(results, batch, prefilled) if results or state.aborting else {}
        for name, sequence in ended.items():
            if name in decodes.members:
                decodes.remove(sequence)
        # Ended requests are out of `decodes` by now: a request that ended leaves nothing staged.
        staging = [s for name, s in state.staging.items() if name in decodes.members] if state.staging else []
        for sequence in staging:
            decodes.remove(sequence)
        state.rejoin(decodes)
        events += [state.leave_staged(sequence, now) for sequence in staging]
        for name, sequence in prefilled.items():
            if name in ended:
                continue
            # A prefill-only request has its first token: keep its KV for the transfer, drop the request.
            if sequence.leaves_staged:
                events.append(state.leave_staged(sequence, now))
                continue
            state.ready.add(sequence)
            state.policy.decoding(name)
        events += [state.end(sequence, now) for sequence in ended.values()]
        return events

    def interrupted(self, batch_id: int, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self._state
        batch = state.in_flight.pop(batch_id, None)
        if batch is None or batch.decodes.members:
            raise InvariantError(f"batch {batch_id} is not in flight, or decodes")
        events = state.drain_events()
        for chunk, sequence in zip(batch.chunks, batch.sequences, strict=True):
            sequence.in_flight -= 1
            if sequence.aborted:
                events.append(state.end(sequence, now))
            else:
                state.policy.interrupted(chunk.request, chunk.start, chunk.tokens)
        return events

    def _advance_prefills(
        self, batch: BatchInFlight, now: float, events: list[RequestEvent]
    ) -> dict[str, SequenceState]:
        """Move the cursors of the chunks' requests.

        Return, by id, those whose last chunk this was: each has its next token."""
        prefilled: dict[str, SequenceState] = {}
        for chunk, sequence in zip(batch.chunks, batch.sequences, strict=True):
            sequence.computed += chunk.tokens
            sequence.in_flight -= 1
            self._state.block_manager.note_computed(chunk.request, sequence.computed)
            if chunk.last:
                prefilled[chunk.request] = sequence
                sequence.generated += 1
            if not sequence.started:
                sequence.started = True
                events.append(RequestEvent("started", chunk.request, now))
        return prefilled

    def _ended(
        self, results: Seq[RequestProgress], batch: BatchInFlight, prefilled: dict[str, SequenceState]
    ) -> dict[str, SequenceState]:
        """Return the requests in no later batch: reported as finished, or aborted and no longer in flight."""
        state = self._state
        ended: dict[str, SequenceState] = {}
        for result in results:
            if result.finished:
                ended[result.request] = state.sequences[result.request]
            elif result.accepted != 1 and not state.sequences[result.request].aborted:
                raise InvariantError(f"{result.request} goes on with {result.accepted} tokens of one iteration")
        if state.aborting:
            # An aborted prefill ends with its last chunk in flight, whether or not its prompt is complete.
            completed = (sequence.request.id for sequence in batch.sequences if not sequence.in_flight)
            here = {*batch.decodes.members, *prefilled, *completed}
            ended.update((name, sequence) for name, sequence in state.aborting.items() if name in here)
        return ended

    def abort(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self._state
        sequence = state.sequences.get(request_id)
        if sequence is None or sequence.aborted:
            return []
        sequence.aborted = True
        # Executors still write to its blocks: free them when the batch completes, not now.
        if state.is_in_flight(sequence):
            state.policy.withdraw(request_id)
            state.aborting[request_id] = sequence
            return []
        if request_id in state.ready.members:
            state.ready.remove(sequence)
        return [state.end(sequence, now)]

    def end_aborted(self, now: float) -> list[RequestEvent]:
        """End aborted requests of which no chunk or decode is in flight any more, in any group. Return their events."""
        state = self._state
        return [state.end(s, now) for s in list(state.aborting.values()) if not state.is_in_flight(s)]

    def stage(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self._state
        sequence = state.sequences.get(request_id)
        if sequence is None or sequence.aborted:
            return []
        if request_id in state.ready.members:
            state.ready.remove(sequence)
            return [state.leave_staged(sequence, now)]
        if request_id in state.waiting_for_kv:
            return [state.leave_staged(sequence, now)]
        # A request that is in flight, or computes lost KV again, leaves with its next token.
        sequence.leaves_staged = True
        if any(request_id in batch.decodes.members for batch in state.in_flight.values()):
            state.staging[request_id] = sequence
        return []

    def lost(self, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        state = self._state
        for batch in state.in_flight.values():
            # Settle before sets are dropped: members' own cursors are stale while they are in a set.
            batch.decodes.settle_all()
        state.in_flight.clear()
        state.ready.settle_all()
        state.ready, state.waiting_for_kv = DecodeSet(), {}
        state.staging.clear()
        events = state.drain_events()
        for sequence in list(state.sequences.values()):
            sequence.in_flight = 0
            if sequence.aborted:
                events.append(state.end(sequence, now))
            elif sequence.lease is not None:
                events.append(state.preempt(sequence, now))
        state.staged_kv.lost()
        # Executors start from empty tables: operations that freed the lost KV must not be replayed.
        state.block_manager.clear_cache()
        state.block_manager.drain_ops()
        return events
