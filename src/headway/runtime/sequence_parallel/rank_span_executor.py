"""A rank's part in runs, as its engine tells it: computed in the rank's own thread, which goes on hearing meanwhile.

A run is computed from inside the rank's loop, and calls back into it: within layers for what concerns KV, a pause or an
end (`poll`), and where all ranks of the instance stand at the same point, for plans as well (`step`): while room is
awaited, and behind a layer where the engine asks for that. Ranks would wait for each other for ever otherwise, one in
a layer of the run and one in a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from headway.core.errors import HeadwayError
from headway.runtime.kv_transfer.peers import PeerLostError
from headway.runtime.kv_transfer.pool_port import KvPort
from headway.runtime.sequence_parallel.span_executor import SpanExecutor
from headway.runtime.sequence_parallel.span_messages import (
    AdmitSpan,
    BeginSpan,
    FinishSpan,
    GrantSlots,
    HoldSpan,
    LayerEdge,
    RunFromRank,
    RunToRank,
    SpanBegun,
    SpanBroken,
    SpanComputed,
    SpanEnded,
    SpanHalted,
    StartSpan,
    SuspendRequest,
    WantSlots,
)

log = logging.getLogger("headway.worker")


class RankLoopCalls(Protocol):
    """The rank's loop (`runtime.executor.rank_loop`), as it may be called from inside a run."""

    @property
    def stopped(self) -> bool:
        """Whether the rank was told to end."""

    def step(self) -> None:
        """Take the next message, or carry out the next plan; waits for one."""

    def poll(self) -> None:
        """Take what has come, and carry out what computes nothing."""


class _OverError(Exception):
    """Nobody wants the run under way any more."""


class RankSpanExecutor:
    """One rank's `SpanExecutor`, driven by messages of the engine. `loop` is set before the first message."""

    loop: RankLoopCalls

    def __init__(self, runs: SpanExecutor, port: KvPort, say: Callable[[RunFromRank], None]) -> None:
        self._runs, self._port, self._say = runs, port, say
        self._name = ""
        self._hold = self._on = False
        self.over = False
        """Whether nobody wants the run under way any more: it ends before anything else is heard."""
        self._given: list[Sequence[tuple[int, int]]] = []

    def on_message(self, said: RunToRank) -> None:
        """The engine's word. What it says of a request that was forgotten is ignored."""
        name = said.name
        if isinstance(said, AdmitSpan):
            self._runs.admit(name, memoryview(said.prompt), said.params, said.output)
        elif name not in self._runs:
            return
        elif isinstance(said, BeginSpan):
            self._carry_out(name, lambda: self._begin(said))
        elif isinstance(said, StartSpan):
            self._carry_out(name, lambda: self._go(said))
        elif isinstance(said, FinishSpan):
            self._carry_out(name, lambda: self._finish(said))
        elif isinstance(said, SuspendRequest):
            self.forget(name)
        elif name != self._name:  # the run had come to an edge, or its end, by itself
            return
        elif isinstance(said, GrantSlots):
            self._given.append(said.slots)
        elif isinstance(said, HoldSpan):
            self._hold = True
        else:
            self._on = True

    def forget(self, name: str) -> None:
        """Drop a request; a run of it that is under way ends as soon as this has returned to it."""
        self.over = self.over or name == self._name
        self._runs.forget(name)

    def _carry_out(self, name: str, body: Callable[[], None]) -> None:
        self._name = name
        try:
            body()
        except _OverError:
            pass
        except PeerLostError as error:
            self._say(SpanBroken(name, str(error), error.end))
        except HeadwayError as error:
            self._say(SpanBroken(name, str(error), None))
        except Exception as error:
            log.exception("a run of %s failed", name)
            self._say(SpanBroken(name, f"it failed: {error}", None))
        finally:
            self._name, self.over = "", False

    def _begin(self, said: BeginSpan) -> None:
        name = said.name

        def room(tokens: int, anew: bool) -> Sequence[tuple[int, int]]:
            self._given.clear()
            self._say(WantSlots(name, tokens, anew))
            while not self._given:
                self._turn()
            return self._given.pop()

        self._port.settle(name)
        self._runs.begin(name, said.run, said.before, said.preemptible, said.drawn, room, self._look)
        self._say(SpanBegun(name))

    def _go(self, said: StartSpan) -> None:
        name, self._hold = said.name, said.hold

        def behind(layers: int) -> None:
            self._port.layers_are_there(name)
            if not said.edges:
                self._look()
                return
            self._on = False
            self._say(LayerEdge(name, layers))
            while not self._on:
                self._turn()

        def pause() -> bool:
            self._look()
            return self._hold

        if self._runs.go(name, pause, behind):
            self._say(SpanComputed(name))
            return
        tokens, layer, saved = self._runs.saved(name)
        self._say(SpanHalted(name, tokens, layer, saved.kv_bytes, saved.activation_bytes, saved.kv_bytes_at_end))

    def _finish(self, said: FinishSpan) -> None:
        name = said.name
        emitted, moved = self._runs.finish(name, said.draw)
        if moved:  # from the place before, which will be others'
            self._port.settle(name)
        self._port.layers_are_there(name)
        self._say(SpanEnded(name, emitted, moved, self._runs.whole_tokens(name)))

    def _look(self) -> None:
        self.loop.poll()
        self._check()
        self._runs.check(self._name)

    def _turn(self) -> None:
        self.loop.step()
        self._check()

    def _check(self) -> None:
        if self.over or self.loop.stopped:
            raise _OverError
