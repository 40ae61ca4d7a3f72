"""Requests in the schedulers of instances: queueing for entry, residency, and its end."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headway.control.backend import ActionImpossible
from headway.control.controlled_request import ControlledRequest
from headway.control.instance_queues import QueueEntry
from headway.control.queue_entries import SchedulerEntry
from headway.control.state import ControllerState
from headway.core.errors import RequestError
from headway.core.span import Phase
from headway.policy.placement.base import EnqueueRequest, SpanPaused, SpanProgress


class SchedulerResidency:
    """Requests in schedulers or queued for one. A request is in one scheduler, or in one queue for entry, at most."""

    def __init__(self, state: ControllerState, reject: Callable[[ControlledRequest, str], None]) -> None:
        """`reject` ends a request that a scheduler has refused, with the reason."""
        self._state = state
        self._reject = reject

    def enqueue(self, action: EnqueueRequest) -> None:
        """Give a request to the scheduler of a group, now or when its turn comes behind spans."""
        state = self._state
        controlled = state.request(action.request)
        group = state.group(action.group, controlled)
        if controlled.scheduler_entry is not None:
            raise ActionImpossible(f"{action.request} waits for its turn already")
        # from another scheduler it takes its KV along
        self.leave(controlled, "moved")
        controlled.prefix, request = action.prefix, controlled.request
        if action.prefix is not None:
            request = msgspec.structs.replace(request, cached_tokens=action.prefix.tokens)
        if not action.concurrent and any(state.queues.blocked(i, action.request) for i in group):
            # a decode has no prompt tokens left to compute: it counts as one, and delays no span
            tokens, seconds = (1, 0.0) if action.phase == "decode" else state.backend.prefill_estimate(request, group)
            entry = controlled.scheduler_entry = SchedulerEntry(controlled, group, action.phase, tokens, seconds)
            state.queues.append(entry)
            state.timeline.extend(entry, state.now)
            state.add_tokens(group, tokens)
            state.touch(group)
            return
        self._enter(controlled, group, action.phase)

    def admit(self, entry: SchedulerEntry) -> None:
        """Let a request whose turn has come enter its scheduler."""
        controlled = entry.controlled
        controlled.scheduler_entry = None
        self._subtract_tokens(entry)
        self._enter(controlled, entry.group, entry.phase)

    def overtake(self, span: QueueEntry) -> None:
        """Move decodes that wait behind a span without enough free KV before it, on all instances: they have their KV
        already, and free it when they end."""
        queues = self._state.queues
        # on all instances, not only the span's: a decode's KV may lie where the span needs blocks
        waiting = (other for queue in queues.waiting for other in queue if isinstance(other, SchedulerEntry))
        decodes = sorted({other for other in waiting if other.phase == "decode" and span.rank < other.rank})
        # `push` goes to the very front: in reverse, so that the decodes keep their order
        for entry in reversed(decodes):
            queues.unqueue(entry)
            queues.push(entry)
            self._state.touch(entry.group)
        if decodes:
            self._state.relayout()

    def _subtract_tokens(self, entry: SchedulerEntry) -> None:
        self._state.add_tokens(entry.group, -entry.tokens)
        self._state.touch(entry.group)

    def _enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase) -> None:
        state = self._state
        try:
            state.backend.enter(controlled, group, phase, state.now)
        except RequestError as error:
            self._reject(controlled, str(error))
            return
        # only after the scheduler has accepted it
        controlled.resident, controlled.group, controlled.phase = True, group, phase
        # from now on its KV is where it is resident; earlier copies no longer count as its places
        controlled.kv_at.clear()
        for i in group:
            state.residents[i] += 1
        state.touch(group)

    def preempt(self, controlled: ControlledRequest) -> None:
        """Pause a decode: `SpanPaused` follows, and its KV is kept."""
        self.leave(controlled, "moved")
        # a decode stops between iterations: all of its tokens are complete in all layers
        at = SpanProgress(controlled.request.prompt_tokens + controlled.output_tokens, 0)
        self._state.pending_events.append(SpanPaused(controlled.request.id, len(controlled.entries) - 1, at))

    def leave(self, controlled: ControlledRequest, why: str) -> None:
        """Take a request out of its scheduler, if it is in one, and keep the number of its output tokens. `why`: see
        `InstanceBackend.leave`."""
        if controlled.resident:
            controlled.output_tokens = self._state.backend.leave(controlled, why, self._state.now)
            self.left(controlled)

    def left(self, controlled: ControlledRequest) -> None:
        """Record that a request is no longer in its scheduler. Its `group` remains: its KV may still be there."""
        controlled.resident = False
        for i in controlled.group:
            self._state.residents[i] -= 1
        self._state.touch(controlled.group)

    def withdraw(self, controlled: ControlledRequest) -> None:
        """Take a request out of the queue for its scheduler, if it is in one."""
        entry = controlled.scheduler_entry
        if entry is not None:
            self._state.queues.unqueue(entry)
            self._subtract_tokens(entry)
            controlled.scheduler_entry = None
            self._state.relayout()
