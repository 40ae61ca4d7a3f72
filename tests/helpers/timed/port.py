"""KV that moves between timed instances: a word at the time at which the last byte would be there.

As in the simulator: a piece takes its bytes over the link from when it is asked for, and cannot be there before its
last layer is computed and sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from tests.helpers.timed.alarm import TimedCalls
from tests.helpers.timed.mail import TimedArrival, TimedMail
from tests.helpers.timed.runs import TimedLatency, TimedSpanExecutor

from headway.core.batch import ClockProtocol
from headway.runtime.kv_transfer.connector import FinishedTransfers, SaveKv


class _TimedSlice(NamedTuple):
    save: SaveKv
    start: int
    end: int
    asked_s: float


class TimedPort:
    """`desk.Port`."""

    def __init__(
        self, times: TimedLatency, runs: TimedSpanExecutor, mail: TimedMail, alarm: TimedCalls, clock: ClockProtocol
    ) -> None:
        self._times, self._runs, self._mail, self._alarm, self._clock = times, runs, mail, alarm, clock
        self._pieces: dict[str, list[_TimedSlice]] = {}
        self._opened: list[str] = []

    def receive(self, request: str, tokens: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Nothing will be written there."""
        self._opened.append(request)

    def opened(self) -> list[str]:
        names, self._opened = self._opened, []
        return names

    def awaits(self, request: str) -> bool:
        """Who decodes is told to when all is there."""
        return False

    def send(self, save: SaveKv, start: int, end: int) -> None:
        self._pieces.setdefault(save.request, []).append(_TimedSlice(save, start, end, self._clock.now()))

    def sending(self) -> list[str]:
        return list(self._pieces)

    def layers_are_there(self, request: str) -> None:
        self._go(request, *self._runs.computed(request))

    def tokens_are_there(self, request: str, tokens: int, blocks: Sequence[tuple[int, int]]) -> None:
        self._go(request, tokens, 1)

    def settle(self, request: str) -> None:
        """There is nothing to overwrite."""

    def finished(self) -> FinishedTransfers:
        return self._mail.finished()

    def forget(self, request: str) -> None:
        self._pieces.pop(request, None)

    def _go(self, request: str, tokens: int, share: int) -> None:
        """KV of the first `tokens` tokens is there, spread over so many."""
        pieces = self._pieces.get(request, [])
        for piece in [piece for piece in pieces if piece.end <= tokens]:
            pieces.remove(piece)
            send_s = self._times.send_s((piece.end - piece.start) / share, piece.save.to)
            due_s = max(piece.asked_s + send_s, self._clock.now() + send_s / self._times.layers)
            note = TimedArrival(piece.save.piece, piece.asked_s, due_s)
            self._alarm.at(due_s, partial(self._mail.post, piece.save.to, request, note))
        if request in self._pieces and not pieces:
            del self._pieces[request]
