"""Requests resident in schedulers, and decodes of groups: which instance takes a decode, with what KV, and where it
continues.

A decode on a group of several instances departs from the policies' papers: its KV is gathered on the group's instance
with the most free tokens, whose scheduler batches it with other decodes. While that instance has too few, or with
`group_decode: in-place`, the group decodes in place (`GroupDecodeSteps`).

A pause or a new group takes effect after the token under way. A decode leaves a scheduler with its KV (`PauseRequest`,
`OutputDelta.staged`); KV that a group holds is gathered, or stays with the instances that continue.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headway.policy.placement.base import Phase
from headway.runtime.cluster.attempt import AttemptTable, RequestAttempt
from headway.runtime.cluster.group_steps import GroupDecodeSteps
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.kv_migrations import LiveKvMigrations
from headway.runtime.engine.instance_protocol import PauseRequest, SpanTaskDone


class LiveResidency:
    """Residency of requests on schedulers, and the decodes of groups, of one cluster."""

    def __init__(
        self,
        fleet: InstanceRegistry,
        attempts: AttemptTable,
        moves: LiveKvMigrations,
        steps: GroupDecodeSteps,
        in_place: bool,
        placed: Callable[[RequestAttempt, int], None],
        over: Callable[[RequestAttempt], None],
    ) -> None:
        """in_place: groups decode where their KV lies. placed: called when a prompt goes to an instance's scheduler.
        over: called with a request whose decode is enqueued after it has ended."""
        self._fleet, self._attempts, self._moves = fleet, attempts, moves
        self._steps, self._in_place = steps, in_place
        self._placed, self._over = placed, over
        self._left: list[RequestAttempt] = []
        self.halted = 0
        """Decodes so far that left a scheduler to continue elsewhere."""

    def enter(self, attempt: RequestAttempt, group: tuple[int, ...], phase: Phase) -> None:
        """Give a request to a group: its whole prompt, or its decode."""
        if phase != "decode":
            self.submit(attempt, self._fleet.kv.roomiest(group), phase)
            return
        attempt.wanted = group
        if attempt.finished:
            self._over(attempt)
        # A transfer, a step or a pause is in progress; its completion handler re-reads `wanted`. A pause cannot be
        # cancelled.
        elif attempt.halts or attempt.gathers or attempt.running:
            attempt.stopping = attempt.halts
        elif attempt.at is not None:
            self._stay(attempt)
        # The group is decoding in place, and no instance of the new one has all of the KV.
        elif attempt.step is not None and not attempt.controlled.kv_at & set(group):
            self._go(attempt)
        else:
            self._decode(attempt, group)

    def submit(self, attempt: RequestAttempt, number: int, phase: Phase = "all") -> None:
        """Give a request to one instance's scheduler."""
        submit = attempt.asked.submit
        attempt.at = number
        # A decode has no prompt to compute, so it adds nothing to the load estimate.
        if phase != "decode":
            self._placed(attempt, number)
        # No timeout: the client's deadline is kept here, over all attempts.
        submit = msgspec.structs.replace(
            submit,
            id=attempt.wire,
            timeout_s=None,
            output=tuple(attempt.asked.told),
            phase=phase,
            priority=attempt.request.priority,
        )
        self._fleet[number].submit(submit, attempt.asked.prompt)
        self._fleet.kv.grown = True

    def leave(self, attempt: RequestAttempt) -> None:
        """Take a request off its scheduler or group, to continue elsewhere.

        A decode stops after the token under way, unless `enter` puts it back before the next `pump`; a prefill starts
        from the beginning.
        """
        if attempt.controlled.phase == "decode":
            attempt.wanted = ()
            attempt.stopping = attempt.at is not None or attempt.gathers or bool(attempt.running)
            self._left.append(attempt)
        elif attempt.at is not None:
            # Under a new id: what the old scheduler still sends for this request must not be taken for the new one's.
            self._fleet.forget(attempt)
            self._moves.settled(attempt)
            attempt.at = None
            self._attempts.rename(attempt)

    def pump(self) -> None:
        """Halt the decodes that left and were not entered again. Called after all actions of a policy's call."""
        left, self._left = self._left, []
        for attempt in left:
            if not attempt.wanted and not attempt.controlled.ended:
                self._halt(attempt)

    def staged(self, attempt: RequestAttempt, number: int) -> None:
        """Continue a halted decode on the group that is wanted now; its KV is staged on instance `number`."""
        attempt.stopping = attempt.halts = False
        attempt.at, attempt.whole = None, {number}
        # The instance dropped the prompt when its scheduler took the request: it needs it again for spans.
        attempt.admitted.discard(number)
        self.halted += 1
        group = attempt.wanted
        if self._several(group):
            self._steps.take_up(attempt, number)
            self._steps.next(attempt, group)
        elif group:
            self._decode(attempt, group)

    def computed(self, number: int, attempt: RequestAttempt, message: SpanTaskDone) -> bool:
        """Handle one instance's part of a token that a group decodes; True if the answer is complete with it."""
        if not self._steps.done(number, attempt, message):
            return False
        if attempt.wanted and not attempt.finished:
            self._go(attempt)
        else:
            # Slices that waited for the token go now: the KV does not grow any more, so its size is known.
            attempt.stopping = False
        return attempt.finished

    def _decode(self, attempt: RequestAttempt, group: tuple[int, ...]) -> None:
        """Begin a decode that no instance computes now, in the cheapest way that its KV allows."""
        # An instance of the group that has all KV decodes at once; of several the lowest number.
        ready = sorted((attempt.whole | attempt.controlled.kv_at) & set(group))
        if ready:
            self._go_on(attempt, ready[0])
        elif attempt.spread and self._several(group):
            self._steps.begin(attempt)
            self._steps.next(attempt, group)
        # Not even the instance with the most free tokens can hold all of it: decode where the KV lies, for now.
        elif attempt.spread and not self._fits(attempt, self._home(attempt, group)):
            self._steps.begin(attempt)
            self._steps.next(attempt, attempt.spread)
        elif attempt.whole or attempt.spread:
            self._gather(attempt, self._home(attempt, group))
        # No KV is left, as with a policy that had the prompt computed elsewhere: prefill again from the start.
        else:
            self.submit(attempt, self._fleet.kv.roomiest(group))

    def _go(self, attempt: RequestAttempt) -> None:
        """Begin the next token of a decode whose KV is spread: on the wanted group, or where the KV lies."""
        group = attempt.wanted
        if self._several(group):
            self._steps.next(attempt, group)
        elif self._fits(attempt, home := self._home(attempt, group)):
            self._gather(attempt, home)
        else:
            self._steps.next(attempt, attempt.spread)

    def _gather(self, attempt: RequestAttempt, home: int) -> None:
        attempt.gathers = True
        self._moves.gather(attempt, home, lambda: self._go_on(attempt, home))

    def _go_on(self, attempt: RequestAttempt, home: int) -> None:
        """Decode on `home`, which has all KV, and free it elsewhere."""
        attempt.gathers = False
        self._steps.end(attempt)
        self.submit(attempt, home, "decode")
        # Before `whole` changes: `leave` takes from it the instances whose copies are to be freed.
        self._fleet.leave(attempt, but=(home,))
        attempt.spread, attempt.whole = (), {home}
        self._moves.settled(attempt)
        self._stay(attempt)

    def _stay(self, attempt: RequestAttempt) -> None:
        """Leave a decode on its scheduler if that is the wanted place; else halt it."""
        if attempt.at in attempt.wanted and not self._several(attempt.wanted):
            attempt.stopping = False
        else:
            self._halt(attempt)

    def _halt(self, attempt: RequestAttempt) -> None:
        """Take a decode off its scheduler. Where KV cannot move it continues there, whatever the policy wants."""
        at = attempt.at
        attempt.stopping = attempt.stopping or at is not None
        # One `PauseRequest` is enough; a delta with `staged`, or the last one, answers it.
        if at is None or attempt.halts:
            return
        if not self._fleet[at].moves_kv:
            attempt.stopping = False
            return
        attempt.halts = True
        self._fleet.tell((at,), PauseRequest(attempt.wire))

    def _several(self, group: tuple[int, ...]) -> bool:
        """Whether a group is to decode in place."""
        return self._in_place and len(group) > 1 and all(self._fleet[i].moves_kv for i in group)

    def _home(self, attempt: RequestAttempt, group: tuple[int, ...]) -> int:
        """Return the instance of a group with the most free tokens for a request; of equals the lowest number."""
        return max(sorted(group), key=lambda number: self._room(attempt, number))

    def _fits(self, attempt: RequestAttempt, number: int) -> bool:
        """Whether an instance has free tokens for all of a request's KV at the end of its output."""
        return self._room(attempt, number) >= attempt.kv_tokens + attempt.asked.left

    def _room(self, attempt: RequestAttempt, number: int) -> int:
        """Return an instance's free tokens for this request: those that it has reserved there count as free."""
        reserved = attempt.room.get(number)
        return self._fleet.kv.room(number) + (0 if reserved is None else reserved.tokens)
