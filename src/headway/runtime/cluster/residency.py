"""Requests resident in schedulers, and decodes of groups: which instance takes a decode, with what KV, and where it
continues.

A decode on a group of several, or where not all KV is on one instance, is a departure from the policies' and papers'
own: KV is gathered on the instance of the group with the most room, whose scheduler batches the decode with others.
For as long as that has no room, or where the cluster file says so, the group decodes in place (`steps`).

A policy that pauses a decode, or gives it another group, is obeyed behind the token under way. Out of a scheduler it
comes with its KV (`HaltDecode`, `Staged`); what a group holds is gathered, or lies with those of it that go on.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headway.policy.placement.base import Phase
from headway.runtime.cluster.attempt import AttemptTable, RequestAttempt
from headway.runtime.cluster.group_steps import GroupDecodeSteps
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.kv_migrations import LiveKvMigrations
from headway.runtime.cluster.messages import HaltDecode, SpanTaskDone


class LiveResidency:
    """halted: decodes that were taken out of a scheduler to go on elsewhere."""

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
        """in_place: groups decode where their KV lies. placed: told when a prompt goes to an instance's scheduler;
        over: that a request has ended already, whose decode the policy enqueues."""
        self._fleet, self._attempts, self._moves = fleet, attempts, moves
        self._steps, self._in_place = steps, in_place
        self._placed, self._over = placed, over
        self._left: list[RequestAttempt] = []
        self.halted = 0

    def enter(self, attempt: RequestAttempt, group: tuple[int, ...], phase: Phase) -> None:
        """Give a request to a group."""
        if phase != "decode":
            self.submit(attempt, self._fleet.roomiest(group), phase)
            return
        attempt.wanted = group
        if attempt.finished:
            self._over(attempt)
        elif attempt.halts or attempt.gathers or attempt.running:
            attempt.stopping = attempt.halts  # it goes on as is wanted then
        elif attempt.at is not None:
            self._stay(attempt)
        elif attempt.step is not None and not attempt.journey.kv_at & set(group):
            self._go(attempt)
        else:
            self._decode(attempt, group)

    def submit(self, attempt: RequestAttempt, number: int, phase: Phase = "all") -> None:
        """To one instance's scheduler."""
        submit = attempt.asked.submit
        attempt.at = number
        if phase != "decode":
            self._placed(attempt, number)
        submit = msgspec.structs.replace(
            submit, id=attempt.wire, timeout_s=None, output=tuple(attempt.asked.told), phase=phase
        )
        self._fleet[number].submit(submit, attempt.asked.prompt)

    def leave(self, attempt: RequestAttempt) -> None:
        """Out of a scheduler, or of its group's hands, to go elsewhere: a decode stops behind the token under way,
        unless `enter` says before `pump` that it goes on as it does; a prefill begins anew."""
        if attempt.journey.phase == "decode":
            attempt.wanted = ()
            attempt.stopping = attempt.at is not None or attempt.gathers or bool(attempt.running)
            self._left.append(attempt)
        elif attempt.at is not None:
            self._fleet.forget(attempt)
            self._moves.settled(attempt)
            attempt.at = None
            self._attempts.rename(attempt)

    def pump(self) -> None:
        """The policy has said what it wants for now."""
        left, self._left = self._left, []
        for attempt in left:
            if not attempt.wanted and not attempt.journey.ended:
                self._halt(attempt)

    def staged(self, attempt: RequestAttempt, number: int) -> None:
        """A decode has left its scheduler, and its KV stays there: it goes on as is wanted now."""
        attempt.stopping = attempt.halts = False
        attempt.at, attempt.whole = None, {number}
        attempt.admitted.discard(number)
        self.halted += 1
        self._moves.begun(attempt)
        group = attempt.wanted
        if self._several(group):
            self._steps.take_up(attempt, number)
            self._steps.next(attempt, group)
        elif group:
            self._decode(attempt, group)

    def computed(self, number: int, attempt: RequestAttempt, message: SpanTaskDone) -> bool:
        """An instance has done its part of a token that a group decodes; True when the answer is whole with that."""
        if not self._steps.done(number, attempt, message):
            return False
        if attempt.finished:
            self._moves.begun(attempt)
        elif attempt.wanted:
            self._go(attempt)
        else:
            attempt.stopping = False
            self._moves.begun(attempt)
        return attempt.finished

    def _decode(self, attempt: RequestAttempt, group: tuple[int, ...]) -> None:
        """Begin a decode that nobody computes now."""
        ready = sorted((attempt.whole | attempt.journey.kv_at) & set(group))
        if ready:
            self._go_on(attempt, ready[0])
        elif attempt.spread and self._several(group):
            self._steps.begin(attempt)
            self._steps.next(attempt, group)
        elif attempt.spread and not self._fits(attempt, self._home(attempt, group)):
            self._steps.begin(attempt)
            self._steps.next(attempt, attempt.spread)
        elif attempt.whole or attempt.spread:
            self._gather(attempt, self._home(attempt, group))
        else:  # nothing is left of it: a policy that had it prefilled elsewhere
            self.submit(attempt, self._fleet.roomiest(group))

    def _go(self, attempt: RequestAttempt) -> None:
        """The next token of a decode whose KV several have: on the group that is wanted, where that can be."""
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
        """All KV is there: decode, and let go of it elsewhere."""
        attempt.gathers = False
        self._steps.end(attempt)
        self.submit(attempt, home, "decode")
        self._fleet.leave(attempt, but=(home,))
        attempt.spread, attempt.whole = (), {home}
        self._moves.settled(attempt)
        self._stay(attempt)

    def _stay(self, attempt: RequestAttempt) -> None:
        """It is in a scheduler, where it stays if that is what is wanted."""
        if attempt.at in attempt.wanted and not self._several(attempt.wanted):
            attempt.stopping = False
        else:
            self._halt(attempt)

    def _halt(self, attempt: RequestAttempt) -> None:
        """Out of its scheduler. Where KV cannot move it goes on there, whatever is wanted."""
        at = attempt.at
        attempt.stopping = attempt.stopping or at is not None
        if at is None or attempt.halts:
            return
        if not self._fleet[at].moves_kv:
            attempt.stopping = False
            return
        attempt.halts = True
        self._fleet.tell((at,), HaltDecode(attempt.wire))

    def _several(self, group: tuple[int, ...]) -> bool:
        """Whether a group is to decode in place."""
        return self._in_place and len(group) > 1 and all(self._fleet[i].moves_kv for i in group)

    def _home(self, attempt: RequestAttempt, group: tuple[int, ...]) -> int:
        """The instance of a group that has the most room for a request."""
        return max(sorted(group), key=lambda number: self._room(attempt, number))

    def _fits(self, attempt: RequestAttempt, number: int) -> bool:
        """Whether an instance has room for all of a request's KV, now and at its end."""
        return self._room(attempt, number) >= attempt.kv_tokens + attempt.asked.left

    def _room(self, attempt: RequestAttempt, number: int) -> int:
        """What is free on an instance, or was asked for there for this request."""
        return self._fleet.room(number) + attempt.space.get(number, 0)
