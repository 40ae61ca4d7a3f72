"""A rank's part in span tasks, driven by its engine's messages and computed in the rank's own thread.

A task is computed from inside the rank's loop and calls back into it: within layers for messages about KV, a pause or
an end (`poll`), and at points that all ranks of the instance reach, for plans as well (`step`): while slots are
awaited, and after a layer where the engine requests it. Plans anywhere else would deadlock: one rank would wait in a
layer of the task, and another in a batch.
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
    """The methods of the rank's loop (`runtime.executor.rank_loop`) that may be called within a span task."""

    @property
    def stopped(self) -> bool:
        """Whether the rank has received `StopRank`."""

    def step(self) -> None:
        """See `RankLoop.step`."""

    def poll(self) -> None:
        """See `RankLoop.poll`."""


class _OverError(Exception):
    """The current task was cancelled: unwinds its computation."""


class RankSpanExecutor:
    """One rank's `SpanExecutor`, driven by messages of the engine. `loop` is set before the first message."""

    loop: RankLoopCalls

    def __init__(self, runs: SpanExecutor, port: KvPort, send: Callable[[RunFromRank], None]) -> None:
        self._runs, self._port, self._send = runs, port, send
        self._name = ""
        self._hold = self._on = False
        self.over = False
        """Whether the current task is cancelled. No message is processed until it has ended."""
        self._given: list[Sequence[tuple[int, int]]] = []

    def on_message(self, message: RunToRank) -> None:
        """Process a message of the engine. Messages about forgotten requests are ignored."""
        name = message.name
        if isinstance(message, AdmitSpan):
            self._runs.admit(name, memoryview(message.prompt), message.params, message.output)
        elif name not in self._runs:
            return
        elif isinstance(message, BeginSpan):
            self._carry_out(name, lambda: self._begin(message))
        elif isinstance(message, StartSpan):
            self._carry_out(name, lambda: self._go(message))
        elif isinstance(message, FinishSpan):
            self._carry_out(name, lambda: self._finish(message))
        elif isinstance(message, SuspendRequest):
            self.forget(name)
        elif name != self._name:  # the run had come to an edge, or its end, by itself
            return
        elif isinstance(message, GrantSlots):
            self._given.append(message.slots)
        elif isinstance(message, HoldSpan):
            self._hold = True
        else:
            self._on = True

    def forget(self, name: str) -> None:
        """Drop a request. Its current task, if any, ends at its next check."""
        self.over = self.over or name == self._name
        self._runs.forget(name)

    def _carry_out(self, name: str, body: Callable[[], None]) -> None:
        self._name = name
        try:
            body()
        except _OverError:
            pass
        except PeerLostError as error:
            self._send(SpanBroken(name, str(error), error.end))
        except HeadwayError as error:
            self._send(SpanBroken(name, str(error), None))
        except Exception as error:
            log.exception("a run of %s failed", name)
            self._send(SpanBroken(name, f"it failed: {error}", None))
        finally:
            # Messages behind the cancellation were deferred by `over`: they are processed from here on.
            self._name, self.over = "", False

    def _begin(self, message: BeginSpan) -> None:
        name = message.name

        def allocate_slots(tokens: int, replace: bool) -> Sequence[tuple[int, int]]:
            self._given.clear()
            self._send(WantSlots(name, tokens, replace))
            while not self._given:
                self._turn()
            return self._given.pop()

        # KV that still moves from this place must be out before the task may write to it.
        self._port.settle(name)
        self._runs.begin(
            name, message.run, message.before, message.preemptible, message.drawn, allocate_slots, self._look
        )
        self._send(SpanBegun(name))

    def _go(self, message: StartSpan) -> None:
        name, self._hold = message.name, message.hold

        def behind(layers: int) -> None:
            self._port.layers_are_there(name)
            if not message.edges:
                self._look()
                return
            self._on = False
            self._send(LayerEdge(name, layers))
            while not self._on:
                self._turn()

        def pause() -> bool:
            self._look()
            return self._hold

        if self._runs.go(name, pause, behind):
            self._send(SpanComputed(name))
            return
        tokens, layer, saved = self._runs.saved(name)
        self._send(SpanHalted(name, tokens, layer, saved.kv_bytes, saved.activation_bytes, saved.kv_bytes_at_end))

    def _finish(self, message: FinishSpan) -> None:
        name = message.name
        emitted, moved = self._runs.finish(name, message.draw)
        # Transfers that still read the old place must end before its slots are reused.
        if moved:
            self._port.settle(name)
        self._port.layers_are_there(name)
        self._send(SpanEnded(name, emitted, moved, self._runs.whole_tokens(name)))

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
