"""A timed instance's part in runs: it sleeps through them, piece by piece and layer by layer.

All of a group begin when they are told, which is at once but for what messages take, and end with the slowest: nothing
that they would exchange is waited for. A pause is said to the group's first, which tells the others. What a run takes,
and where it can be paused, is what the simulator goes by (`perf.latency.groups`).
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from msgspec import structs
from tests.helpers.timed.executor import TOKEN
from tests.helpers.timed.mail import TimedMail, TimedStop

from headway.core.batch import ClockProtocol, EmittedToken
from headway.core.request import SamplingParams, SpanTask, cut
from headway.perf.latency.groups import PausePoints
from headway.runtime.cluster.agent import Slots
from headway.runtime.engine.protocol import ComputeSpan
from headway.runtime.kv_transfer.peers import PeerStream

_NAP_S = 0.005
_TOO_LATE_S = 0.05
"""With less than so much left a run is not paused: others of its group may have ended already."""


class TimedLatency(Protocol):
    """How long things take."""

    @property
    def layers(self) -> int: ...

    def run_s(self, run: SpanTask, before: Sequence[SpanTask]) -> float:
        """All of a run, on its group."""

    def send_s(self, tokens: float, to: int) -> float:
        """KV of so many tokens, from here to another instance."""

    def saved(self, run: SpanTask, start: int, end: int, layer: int) -> TimedSavedBytes:
        """What of a run that is paused before `layer` of its piece [start, end) is kept here."""


class TimedSavedBytes(NamedTuple):
    """See `runtime.sequence_parallel.prefill`; bytes by the model's shape."""

    kv_bytes: int
    activation_bytes: int
    kv_bytes_at_end: int


class _TimedSpan:
    """One request. `edges_s`: where its run could be paused, in seconds of it, its ends among them; `edge`: of these,
    how many it has come to beside the first."""

    __slots__ = ("alone", "computed", "draws", "edge", "edges_s", "line", "pieces", "preemptible", "run")

    def __init__(self) -> None:
        self.run: SpanTask | None = None
        self.pieces: tuple[tuple[int, int], ...] = ()
        self.edges_s: list[float] = [0.0]
        self.edge = self.computed = 0
        self.preemptible = self.draws = False
        self.alone = True
        self.line: PeerStream | None = None


class TimedSpanExecutor:
    """`member.Computes`."""

    def __init__(self, times: TimedLatency, mail: TimedMail, clock: ClockProtocol) -> None:
        self._times, self._mail, self._clock = times, mail, clock
        self._number = mail.peers.number
        self._parts: dict[str, _TimedSpan] = {}

    def admit(self, name: str, prompt: memoryview, params: SamplingParams, output: tuple[int, ...]) -> None:
        self._parts[name] = _TimedSpan()

    def begin(
        self, compute: ComputeSpan, allocate_slots: Callable[[int, bool], Slots], look: Callable[[], None]
    ) -> None:
        name, run = compute.id, compute.run
        part = self._parts[name]
        part.line = self._mail.peers.line(name, run.group)
        allocate_slots(-(-run.end // len(run.group)), False)
        part.run, part.preemptible, part.draws, part.edge = run, compute.preemptible, compute.last, 0
        part.alone = part.alone and run.group == (self._number,)
        part.pieces = ((run.start, run.end),)
        if not run.in_place:
            part.pieces = cut(run.start, run.end, len(run.group), run.rows)
        part.edges_s = self._edges_s(run, part.pieces, compute.before)

    def _edges_s(self, run: SpanTask, pieces: Sequence[tuple[int, int]], before: Sequence[SpanTask]) -> list[float]:
        times = self._times
        edges = PausePoints(
            tuple(pieces), lambda a, b: times.run_s(structs.replace(run, start=a, end=b), ()), times.layers
        )
        whole_s = times.run_s(run, before)
        inner = [whole_s * edges.elapsed_share(start, layer) for start, _ in pieces for layer in range(times.layers)]
        return [*inner, whole_s]

    def go(self, name: str, pause: Callable[[], bool] | None, behind: Callable[[int], None]) -> bool:
        try:
            return self._sleep(name, pause, behind)
        finally:
            self._mail.ring()  # else the loop would sleep on what has come meanwhile for the scheduler

    def _sleep(self, name: str, pause: Callable[[], bool] | None, behind: Callable[[int], None]) -> bool:
        part, layers = self._parts[name], self._times.layers
        run, edges_s, last = part.run, part.edges_s, len(part.edges_s) - 1
        assert run is not None
        began_s, stop = self._clock.now() - edges_s[part.edge], last
        while True:
            done_s = self._clock.now() - began_s
            part.edge = min(stop, bisect_right(edges_s, done_s + 1e-9) - 1)
            if part.edge == last:
                behind(layers)
                part.computed = run.end
                return True
            if part.edge == stop:
                break
            told = self._mail.stopped(name)
            if told is not None:
                stop = part.edge = told
                break
            if stop == last and part.preemptible and pause is not None and pause():
                at = bisect_left(edges_s, done_s - 1e-9)
                if edges_s[last] - edges_s[at] > _TOO_LATE_S:
                    stop = at
                    for other in run.group:
                        if other != self._number:
                            self._mail.post(other, name, TimedStop(stop))
            time.sleep(max(0.0, min(_NAP_S, edges_s[stop] - done_s)))
            behind(part.edge % layers)
        return False

    def finish(self, name: str) -> tuple[EmittedToken | None, bool]:
        part = self._parts[name]
        first = part.run is not None and part.run.group[0] == self._number
        return (EmittedToken(name, TOKEN, None) if part.draws and first else None), False

    def saved(self, name: str) -> tuple[int, int, TimedSavedBytes]:
        part = self._parts[name]
        assert part.run is not None
        piece, layer = divmod(part.edge, self._times.layers)
        start, end = part.pieces[piece]
        return start, layer, self._times.saved(part.run, start, end, layer)

    def whole(self, name: str, tokens: int) -> bool:
        part = self._parts.get(name)
        return part is not None and part.alone and part.computed == tokens

    def check(self, name: str) -> None:
        line = self._parts[name].line
        if line is not None:
            line.check()

    def forget(self, name: str) -> None:
        self._parts.pop(name, None)
        self._mail.forget(name)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def computed(self, name: str) -> tuple[int, int]:
        """(tokens whose KV runs have left on this instance's last group, instances of that group)."""
        part = self._parts.get(name)
        return (0, 1) if part is None or part.run is None else (part.computed, len(part.run.group))
