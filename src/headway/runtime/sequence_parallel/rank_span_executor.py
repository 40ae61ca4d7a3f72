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
from headway.runtime.engine.instance_protocol import (
    ComputeSpan,
    PauseRequest,
    ResumeSpan,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
)
from headway.runtime.engine.protocol import AbortRequest, SubmitRequest
from headway.runtime.executor.messages import (
    SpanFromRank,
    SpanToRank,
)
from headway.runtime.kv_transfer.peers import PeerLostError
from headway.runtime.kv_transfer.pool_port import KvPort
from headway.runtime.kv_transfer.rank_routes import instance_of
from headway.runtime.sequence_parallel.span_executor import SpanExecutor

log = logging.getLogger("headway.worker")


class RankLoopCalls(Protocol):
    """The methods of the rank's loop (`runtime.executor.rank_loop`) that may be called within a span task."""

    @property
    def stopped(self) -> bool:
        """Whether the rank has received `EndProcess`."""

    def step(self) -> None:
        """See `RankLoop.step`."""

    def poll(self) -> None:
        """See `RankLoop.poll`."""


class _OverError(Exception):
    """The current task was cancelled: unwinds its computation."""


class RankSpanExecutor:
    """One rank's `SpanExecutor`, driven by messages of the engine. `loop` is set before the first message."""

    loop: RankLoopCalls

    def __init__(self, runs: SpanExecutor, port: KvPort, send: Callable[[SpanFromRank], None]) -> None:
        self._runs, self._port, self._send = runs, port, send
        self._tasks: dict[str, ComputeSpan] = {}
        self._name = ""
        self._hold = False
        self._resumed: list[ResumeSpan] = []
        self.over = False
        """Whether the current task is cancelled. No message is processed until it has ended."""

    def on_message(self, message: SpanToRank, prompt: memoryview | None = None) -> None:
        """Process a message of the engine; prompt: the frame behind `SubmitRequest`. Messages about forgotten requests
        are ignored."""
        name = message.id
        if isinstance(message, SubmitRequest):
            assert prompt is not None
            self._runs.admit(name, prompt, message.params, message.output)
        elif name not in self._runs:
            return
        elif isinstance(message, ComputeSpan):
            self._tasks[name] = message
            self._carry_out(message, self._begin)
        elif isinstance(message, AbortRequest):
            self.forget(name)
        elif isinstance(message, ResumeSpan) and name != self._name:
            self._carry_out(self._tasks[name], self._go)
        elif name != self._name:  # the task had come to an edge, or its end, by itself
            return
        elif isinstance(message, PauseRequest):
            # Only the group's first rank acts on it: the others follow.
            self._hold = True
        else:
            self._resumed.append(message)

    def forget(self, name: str) -> None:
        """Drop a request. Its current task, if any, ends at its next check."""
        self.over = self.over or name == self._name
        self._tasks.pop(name, None)
        self._runs.forget(name)

    def _carry_out(self, task: ComputeSpan, body: Callable[[ComputeSpan], None]) -> None:
        name = self._name = task.id
        self._hold = False
        try:
            body(task)
        except _OverError:
            pass
        except PeerLostError as error:
            self._send(SpanTaskLost(name, str(error), None if error.end is None else instance_of(error.end)))
        except HeadwayError as error:
            self._send(SpanTaskLost(name, str(error)))
        except Exception as error:
            log.exception("a run of %s failed", name)
            self._send(SpanTaskLost(name, f"it failed: {error}"))
        finally:
            # Messages behind the cancellation were deferred by `over`: they are processed from here on.
            self._name, self.over = "", False

    def _begin(self, task: ComputeSpan) -> None:
        name = task.id

        def allocate_slots(tokens: int, replace: bool) -> Sequence[tuple[int, int]]:
            return self._wait(task, 0, tokens, replace).slots

        # KV that still moves from this place must be out before the task may write to it.
        self._port.settle(name)
        self._runs.begin(task, allocate_slots, self._look)
        self._go(task)

    def _go(self, task: ComputeSpan) -> None:
        name = task.id

        def behind(layers: int) -> None:
            self._port.layers_are_there(name)
            if not task.beside:
                self._look()
                return
            self._wait(task, layers)

        def pause() -> bool:
            self._look()
            return self._hold

        if self._runs.go(name, pause, behind):
            self._finish(name)
            return
        tokens, layer, saved = self._runs.saved(name)
        self._send(
            SpanTaskPaused(
                id=name,
                index=task.index,
                tokens=tokens,
                layer=layer,
                kv_bytes=saved.kv_bytes,
                activation_bytes=saved.activation_bytes,
                kv_bytes_at_end=saved.kv_bytes_at_end,
            )
        )

    def _finish(self, name: str) -> None:
        emitted, moved = self._runs.finish(name)
        # Transfers that still read the old place must end before its slots are reused.
        if moved:
            self._port.settle(name)
        self._port.layers_are_there(name)
        whole = self._runs.whole_tokens(name)
        self._send(SpanTaskDone(id=name, index=self._tasks[name].index, emitted=emitted, moved=moved, whole=whole))

    def _look(self) -> None:
        self.loop.poll()
        self._check()
        self._runs.check(self._name)

    def _wait(self, task: ComputeSpan, layer: int, slots: int = 0, replace: bool = False) -> ResumeSpan:
        """Return what the engine answers; carry out its plans meanwhile."""
        self._resumed.clear()
        waits = SpanTaskPaused(id=task.id, index=task.index, layer=layer, waits=True, slots=slots, replace=replace)
        self._send(waits)
        while not self._resumed:
            self.loop.step()
            self._check()
        return self._resumed.pop()

    def _check(self) -> None:
        if self.over or self.loop.stopped:
            raise _OverError
