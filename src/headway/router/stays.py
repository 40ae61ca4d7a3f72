"""Requests in schedulers: which instance of a group takes one, and with what.

A decode on a group of several, or where not all KV is on one instance, is a departure from the policies' and papers'
own: KV is gathered on the instance of the group with the most room, whose scheduler batches the decode with others.
Where that has no room now, or the cluster file says so, the group decodes in place (`steps`). Either way it stays there
until its end: a policy that pauses a decode, or gives it another group, is obeyed in its books only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from headway.placement.base import Phase
from headway.router.attempt import Attempt, Attempts
from headway.router.fleet import Fleet
from headway.router.moves import Moves
from headway.router.steps import Steps


class Stays:
    def __init__(
        self,
        fleet: Fleet,
        attempts: Attempts,
        moves: Moves,
        steps: Steps,
        in_place: bool,
        placed: Callable[[Attempt, int], None],
        over: Callable[[Attempt], None],
    ) -> None:
        """in_place: groups decode where their KV lies. placed: told when a prompt goes to an instance's scheduler;
        over: that a request has ended already, whose decode the policy enqueues."""
        self._fleet, self._attempts, self._moves = fleet, attempts, moves
        self._steps, self._in_place = steps, in_place
        self._placed, self._over = placed, over

    def enter(self, attempt: Attempt, group: tuple[int, ...], phase: Phase) -> None:
        """Give a request to a group."""
        if phase != "decode":
            self.submit(attempt, self._roomiest(group), phase)
        elif attempt.finished:
            self._over(attempt)
        elif attempt.at is None and attempt.step is None and not attempt.gathers:
            self._decode(attempt, group)

    def submit(self, attempt: Attempt, number: int, phase: Phase = "all") -> None:
        """To one instance's scheduler."""
        submit = attempt.asked.submit
        attempt.at = number
        if phase != "decode":
            self._placed(attempt, number)
        submit = msgspec.structs.replace(
            submit, id=attempt.wire, timeout_s=None, output=tuple(attempt.asked.told), phase=phase
        )
        self._fleet[number].submit(submit, attempt.asked.prompt)

    def leave(self, attempt: Attempt) -> None:
        """Out of a scheduler, to go elsewhere: a decode goes on where it is; a prefill begins anew."""
        if attempt.at is None or attempt.journey.phase == "decode":
            return
        self._fleet.forget(attempt)
        attempt.at = None
        self._attempts.rename(attempt)

    def _decode(self, attempt: Attempt, group: tuple[int, ...]) -> None:
        ready = sorted((attempt.whole | attempt.journey.kv_at) & set(group))
        if ready:
            self._go_on(attempt, ready[0])
        elif attempt.whole or attempt.spread:
            home = self._roomiest(group)
            if attempt.spread and (self._in_place or self._room(home) < attempt.kv_tokens + attempt.asked.left):
                self._steps.begin(attempt)
                return
            attempt.gathers = True
            self._moves.gather(attempt, home, lambda: self._go_on(attempt, home))
        else:  # nothing is left of it: a policy that had it prefilled elsewhere
            self.submit(attempt, self._roomiest(group))

    def _go_on(self, attempt: Attempt, home: int) -> None:
        """All KV is there: decode, and let go of it elsewhere."""
        attempt.gathers = False
        self.submit(attempt, home, "decode")
        self._fleet.forget(attempt, but=(home,))
        attempt.spread, attempt.whole = (), {home}
        self._moves.settled(attempt)

    def _roomiest(self, group: Iterable[int]) -> int:
        """The instance with the most room for KV; of equals the first."""
        return max(sorted(group), key=self._room)

    def _room(self, number: int) -> int:
        """KV tokens that are free on an instance."""
        instance = self._fleet[number]
        total = 0 if instance.info is None else instance.info.kv_tokens_total
        return total - instance.stats.kv_tokens_used
