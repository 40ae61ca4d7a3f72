"""The engine's side of span tasks where the instance is several processes: directs the ranks' parts. No torch.

Each call sends a message to all ranks and returns when all have answered; the loop's own work is done in between. Ranks
give the same kinds of answers in the same order, because their parts of a task have the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from headway.core.batch import KvOp
from headway.core.errors import HeadwayError, InvariantError
from headway.core.executor import EmittedToken
from headway.core.sampling import SamplingParams
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
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.kv_transfer.peer import PeerLostError

Slots = Sequence[tuple[int, int]]
W = TypeVar("W", bound=SpanFromRank)

_WAIT_S = 0.005
"""Interval between two calls of the loop's `look` while ranks compute."""


class SpanTaskError(HeadwayError):
    """A span cannot be completed: a rank has reported so."""


class _PreparedSpan(NamedTuple):
    compute: ComputeSpan
    allocate_slots: Callable[[int, bool], Slots]
    look: Callable[[], None]


class MultiRankSpanExecutor:
    """`SpanExecutor` of an instance of several ranks, with the same contract.

    pending_ops: returns KV operations that no batch has carried yet; ranks must replay them before they write to the
    blocks.
    """

    def __init__(self, executor: MultiProcessExecutor, pending_ops: Callable[[], tuple[KvOp, ...]]) -> None:
        self._executor, self._pending_ops = executor, pending_ops
        self._ranks = executor.layout.accelerators
        self._known: set[str] = set()
        self._tasks: dict[str, _PreparedSpan] = {}
        self._ended: dict[str, list[SpanTaskDone]] = {}
        self._saved: dict[str, SpanTaskPaused] = {}
        self._name = ""
        self._replies: dict[int, SpanFromRank] = {}

    def on_message(self, rank: int, reply: SpanFromRank) -> None:
        """Record a rank's answer. Answers about other requests than the current one are ignored."""
        # The first answer of a rank counts, but a failure replaces an answer given before it.
        if reply.id == self._name and (rank not in self._replies or isinstance(reply, SpanTaskLost)):
            self._replies[rank] = reply

    def admit(self, name: str, prompt: memoryview, params: SamplingParams, output: tuple[int, ...]) -> None:
        """See `SpanExecutor.admit`."""
        self._known.add(name)
        admit = SubmitRequest(id=name, prompt_tokens=prompt.nbytes // 4, params=params, output=output, phase="spans")
        self._executor.send_control(admit, prompt)

    def begin(
        self, compute: ComputeSpan, allocate_slots: Callable[[int, bool], Slots], look: Callable[[], None]
    ) -> None:
        """See `SpanExecutor.begin`. The ranks prepare the task when `go` first tells them of it."""
        self._tasks[compute.id] = _PreparedSpan(compute, allocate_slots, look)
        self._ended.pop(compute.id, None)

    def go(self, name: str, pause: Callable[[], bool] | None, behind: Callable[[int], None]) -> bool:
        """See `SpanExecutor.go`. `behind` is called only for tasks with `beside`, where plans are carried out between
        layers."""
        task = self._tasks[name]
        held = False

        def asked() -> None:
            nonlocal held
            if not held and pause is not None and pause():
                held = True
                self._send_all(PauseRequest(name))

        paused = self._saved.pop(name, None) is not None
        replies = self._ask(ResumeSpan(name) if paused else task.compute, asked)
        while True:
            if isinstance(replies[0], SpanTaskDone):
                self._ended[name] = _all(replies, SpanTaskDone)
                return True
            stopped = _all(replies, SpanTaskPaused)
            if len({(one.waits, bool(one.layer)) for one in stopped}) > 1:
                raise InvariantError(f"ranks of one instance differ in a run: {replies}")
            if stopped[0].waits and stopped[0].layer:
                behind(stopped[0].layer)
                replies = self._ask(ResumeSpan(name), asked)
            elif stopped[0].waits:
                replies = self._ask(self._grant(task, stopped), asked)
            else:
                self._saved[name] = msgspec.structs.replace(
                    stopped[0],
                    kv_bytes=sum(one.kv_bytes for one in stopped),
                    activation_bytes=sum(one.activation_bytes for one in stopped),
                    kv_bytes_at_end=sum(one.kv_bytes_at_end for one in stopped),
                )
                return False

    def _grant(self, task: _PreparedSpan, wants: Sequence[SpanTaskPaused]) -> ResumeSpan:
        # Ranks ask for the same number of slots, or for fewer where their shares differ by a token.
        slots = task.allocate_slots(max(one.slots for one in wants), wants[0].replace)
        # Ranks must own the blocks before the slots are granted; both messages keep their order.
        self._executor.replay(self._pending_ops())
        return ResumeSpan(task.compute.id, tuple(slots))

    def finish(self, name: str) -> tuple[EmittedToken | None, bool]:
        """See `SpanExecutor.finish`: ranks finish by themselves."""
        ended = self._ended[name]
        return ended[0].emitted, any(one.moved for one in ended)

    def saved(self, name: str) -> tuple[int, int, SpanTaskPaused]:
        """See `SpanExecutor.saved`."""
        paused = self._saved[name]
        return paused.tokens, paused.layer, paused

    def whole(self, name: str, tokens: int) -> bool:
        """See `SpanExecutor.whole`."""
        return self._whole(name) == tokens

    def check(self, name: str) -> None:
        """Do nothing: ranks check their peers themselves and report a loss as `SpanTaskLost`."""

    def forget(self, name: str) -> None:
        """See `SpanExecutor.forget`."""
        if name not in self._known:
            return
        if self._whole(name):  # it may have become the request's own, under the number that its blocks have
            self._executor.replay(self._pending_ops())
        self._known.discard(name)
        self._tasks.pop(name, None)
        self._ended.pop(name, None)
        self._saved.pop(name, None)
        self._send_all(AbortRequest(name, number=self._executor.number(name) or 0))

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def _whole(self, name: str) -> int:
        # KV is whole only as far as every rank has its heads of it.
        return min((one.whole for one in self._ended.get(name, ())), default=0)

    def _ask(self, message: SpanToRank, meanwhile: Callable[[], None]) -> list[SpanFromRank]:
        """Send a message to all ranks and return their answers, by rank.

        Raises SpanTaskError or PeerLostError where a rank cannot go on, LostError, and whatever `look` raises.
        """
        self._name, self._replies = message.id, {}
        look = self._tasks[message.id].look
        self._send_all(message)
        meanwhile()
        while True:
            for reply in self._replies.values():
                if isinstance(reply, SpanTaskLost):
                    raise SpanTaskError(reply.why) if reply.by is None else PeerLostError(reply.why, reply.by)
            if len(self._replies) == self._ranks:
                return [self._replies[rank] for rank in range(self._ranks)]
            self._executor.poll(_WAIT_S)
            meanwhile()
            look()

    def _send_all(self, message: SpanToRank) -> None:
        self._executor.send_control(message)


def _all(replies: Sequence[SpanFromRank], kind: type[W]) -> list[W]:
    """Return the answers as the kind that all must have. Raises InvariantError otherwise."""
    alike: list[W] = [reply for reply in replies if isinstance(reply, kind)]
    if len(alike) < len(replies):
        raise InvariantError(f"ranks of one instance differ in a run: {replies}")
    return alike
