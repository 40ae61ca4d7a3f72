"""An executor whose iterations take what was predicted and compute nothing: every token is the same.

Iterations that follow each other without a break are timed from the end of the one before, not from when this process
came round to it, so that a busy host's delays do not add up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.helpers.timed.alarm import TimedCalls

from headway.core.batch import Batch, ClockProtocol, EmittedToken, KvOp, StepResult
from headway.core.request import SamplingParams

TOKEN = 1
"""What is always said."""
_AT_ONCE_S = 0.005


class TimedExecutor:
    """`Executor` of one stage: one batch at a time."""

    free = None
    interrupts: Callable[[], bool] | None = None

    def __init__(self, clock: ClockProtocol, alarm: TimedCalls) -> None:
        self._clock, self._alarm = clock, alarm
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.waits_on: tuple[Any, ...] = (self._bell,)
        self._flying: tuple[Batch, float, float] | None = None
        self._ended_s = self._seen_s = float("-inf")

    @property
    def accepts(self) -> bool:
        return self._flying is None

    def admit(
        self,
        request_id: str,
        prompt: memoryview,
        params: SamplingParams,
        output: tuple[int, ...] = (),
        kept: bool = False,
    ) -> None:
        """Its tokens do not matter."""

    def submit(self, batch: Batch) -> None:
        now = self._clock.now()
        began_s = self._ended_s if now - self._seen_s < _AT_ONCE_S else now
        due_s = began_s + batch.predicted_s
        self._flying = (batch, began_s, due_s)
        self._alarm.at(due_s, self._ring)

    def result(self, timeout_s: float | None) -> StepResult | None:
        """Never waits: `waits_on` says when there is something."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        now = self._clock.now()
        if self._flying is None or now < self._flying[2]:
            return None
        batch, began_s, due_s = self._flying
        self._flying, self._ended_s, self._seen_s = None, due_s, now
        part = batch.parts[0]
        said = [*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)]
        emitted = [EmittedToken(name, TOKEN, None) for name in said]
        return StepResult(batch.id, emitted, due_s - began_s, (((began_s, due_s),),))

    def replay(self, ops: tuple[KvOp, ...]) -> None:
        """There is no pool."""

    def recover(self) -> None:
        """Never called: nothing is lost here alone."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """The process ends."""

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)
