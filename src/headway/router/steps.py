"""Decodes in place: a group goes on, token by token, over the KV that it holds together (LoongServe §4.2).

Each token is a run of its own, which the router begins when the group has told the end of the one before: a round trip
a token, which the paper, whose instances have a scheduler in common, has not.
"""

from __future__ import annotations

from headway.core.span import Strategy
from headway.engine.cluster_messages import Compute, Run, RunDone
from headway.router.attempt import Attempt
from headway.router.fleet import Fleet


class Steps:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def begin(self, attempt: Attempt) -> None:
        """Its prompt is computed, and its first token known."""
        attempt.step = len(attempt.runs)
        self._next(attempt)

    def done(self, number: int, attempt: Attempt, message: RunDone) -> bool:
        """An instance has done its part of a token; True when the answer is whole with that."""
        if message.index != attempt.step or number not in attempt.running:
            return False
        if message.delta is not None:
            attempt.asked.tell(message.delta)
            attempt.finished = message.delta.finish is not None
        attempt.running.discard(number)
        if attempt.running:
            return False
        if not attempt.finished:
            attempt.step += 1
            self._next(attempt)
        return attempt.finished

    def _next(self, attempt: Attempt) -> None:
        assert attempt.step is not None
        asked = attempt.asked
        known = asked.submit.prompt_tokens + len(asked.told)
        run = Run(known - 1, known, attempt.spread, Strategy("ring"), None, True)
        attempt.running = set(attempt.spread)
        message = Compute(id=attempt.wire, index=attempt.step, run=run, drawn=(asked.told[-1],), last=True)
        self._fleet.tell(attempt.spread, message)
