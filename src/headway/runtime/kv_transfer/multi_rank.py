"""The engine's side of KV transfers and span tasks where an instance is several processes. No torch.

Room is there when all ranks have opened theirs, and a piece has come when all have theirs of it. What ranks say of runs
goes on to `computes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from headway.core.batch import EmittedToken, KvOp
from headway.core.errors import HeadwayError, InvariantError
from headway.core.request import SamplingParams
from headway.runtime.engine.protocol import (
    AbortRequest,
    ComputeSpan,
    KvArrived,
    MeetPeers,
    PauseRequest,
    PeerAddress,
    PeerLostError,
    ReserveKv,
    ResumeSpan,
    SendKv,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
    SubmitRequest,
    TransferEnd,
)
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.executor.plans import InstanceFromRank, SpanFromRank, SpanToRank
from headway.runtime.kv_transfer.connector import SaveKv

# Each call sends a message to all ranks and returns when all have answered; the loop's own work is done in between.
# Ranks give the same kinds of answers in the same order, because their parts of a task have the same shape.

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
    """`spans.SpanExecutor` of an instance of several ranks, with the same contract: directs the ranks' parts.

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

    def saved(self, name: str, index: int) -> SpanTaskPaused:
        """See `SpanExecutor.saved`."""
        return msgspec.structs.replace(self._saved[name], index=index)

    def whole_tokens(self, name: str) -> int:
        """See `SpanExecutor.whole_tokens`: KV is whole only as far as every rank has its heads of it."""
        return min((one.whole for one in self._ended.get(name, ())), default=0)

    def check(self, name: str) -> None:
        """Do nothing: ranks check their peers themselves and report a loss as `SpanTaskLost`."""

    def forget(self, name: str) -> None:
        """See `SpanExecutor.forget`."""
        if name not in self._known:
            return
        if self.whole_tokens(name):  # it may have become the request's own, under the number that its blocks have
            self._executor.replay(self._pending_ops())
        self._known.discard(name)
        self._tasks.pop(name, None)
        self._ended.pop(name, None)
        self._saved.pop(name, None)
        self._send_all(AbortRequest(name, number=self._executor.number(name) or 0))

    def __contains__(self, name: str) -> bool:
        return name in self._known

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


class MultiRankKvTransfer:
    """`KvPort` over the ranks of an executor.

    untold: KV operations that no batch has carried yet, which must come before what is said of the blocks that they
    give.
    """

    def __init__(self, executor: MultiProcessExecutor, untold: Callable[[], tuple[KvOp, ...]]) -> None:
        self._executor, self._untold = executor, untold
        self._ranks = frozenset(range(executor.layout.accelerators))
        self._closed: dict[str, set[int]] = {}
        self._opened: list[str] = []
        self._awaited: dict[str, set[int]] = {}
        self._lives: dict[str, int] = {}
        self._life = 0
        self._coming: dict[tuple[str, int, int], dict[int, KvArrived]] = {}
        self._unsent: SendKv | None = None
        self._ended: list[TransferEnd] = []
        self.computes = MultiRankSpanExecutor(executor, untold)
        executor.on_control = self._hear

    def meet(self, peers: Iterable[PeerAddress]) -> None:
        """See `PeerNetwork.meet`."""
        self._executor.send_control(MeetPeers(tuple(peers)))

    def receive(self, request: str, tokens: int, blocks: Slots) -> None:
        """See `KvPort.receive`. `opened` returns the request once all ranks have reserved."""
        # First the block operations that no batch has carried: ranks must know the blocks of the reservation.
        self._executor.replay(self._untold())
        number = self._executor.number(request)
        assert number is not None, f"no blocks are held for {request}"
        self._closed[request] = set(self._ranks)
        self._awaited[request] = set(self._ranks)
        self._life += 1
        self._lives[request] = self._life
        self._executor.send_control(ReserveKv(request, tokens, self._life, number))

    def opened(self) -> list[str]:
        """Requests of which room has been made since the last call."""
        names, self._opened = self._opened, []
        return names

    def awaits(self, request: str) -> bool:
        """See `KvPort.awaits`."""
        return bool(self._awaited.get(request))

    def send(self, save: SaveKv, start: int, end: int) -> None:
        """See `KvPort.send`: goes to the ranks with what is there, which follows at once."""
        self._unsent = SendKv(id=save.request, piece=save.piece, start=start, end=end, to=save.to)

    def sending(self) -> list[str]:
        """Nothing: ranks see by themselves when more is there."""
        return []

    def layers_are_there(self, request: str) -> None:
        """See `KvPort.layers_are_there`: ranks see by themselves which."""
        self.tokens_are_there(request, 0, ())

    def tokens_are_there(self, request: str, tokens: int, blocks: Slots) -> None:
        """See `KvPort.tokens_are_there`. What ranks compute later they see by themselves."""
        send, self._unsent = self._unsent, None
        if send is not None:
            number = self._executor.number(request) or 0
            self._executor.send_control(msgspec.structs.replace(send, number=number, there=tokens))

    def settle(self, request: str) -> None:
        """Ranks see by themselves when slots are about to be overwritten."""

    def finished(self) -> list[TransferEnd]:
        """See `KvPort.finished`."""
        ended, self._ended = self._ended, []
        return ended

    def forget(self, request: str) -> None:
        """See `KvPort.forget`."""
        self._closed.pop(request, None)
        self._awaited.pop(request, None)
        self._lives.pop(request, None)
        self._opened = [name for name in self._opened if name != request]
        for key in [key for key in self._coming if key[0] == request]:
            del self._coming[key]
        self.drop(request, False)

    def drop(self, request: str, for_good: bool) -> None:
        """Ranks forget what comes and goes."""
        self._executor.send_control(AbortRequest(request, for_good))

    # -- what ranks say -----------------------------------------------------------------------------------------------

    def _hear(self, rank: int, said: InstanceFromRank) -> None:
        # Late messages of an earlier reservation under the same name must not count for this one.
        if isinstance(said, ReserveKv | KvArrived) and said.serial != self._lives.get(said.id):
            return
        if isinstance(said, ReserveKv):
            closed = self._closed.get(said.id, set())
            closed.discard(rank)
            if self._closed.get(said.id) == set():
                del self._closed[said.id]
                self._opened.append(said.id)
        elif isinstance(said, KvArrived):
            self._came(rank, said)
        elif isinstance(said, SpanTaskLost) and said.transfer:
            self._ended.append(said)
        else:
            self.computes.on_message(rank, said)

    def _came(self, rank: int, said: KvArrived) -> None:
        if said.id not in self._awaited:
            return
        if said.whole:
            self._awaited[said.id].discard(rank)
        come = self._coming.setdefault((said.id, said.piece, said.source), {})
        come[rank] = said
        if come.keys() == self._ranks:
            del self._coming[said.id, said.piece, said.source]
            began_s, ended_s = min(one.began_s for one in come.values()), max(one.ended_s for one in come.values())
            self._ended.append(msgspec.structs.replace(said, began_s=began_s, ended_s=ended_s))


class MultiRankPeers:
    """`PeerNetwork` over the ranks of instance `number`, which have the connections."""

    def __init__(self, number: int, ranks: MultiRankKvTransfer) -> None:
        self.number, self._ranks = number, ranks

    def meet(self, peers: Iterable[PeerAddress]) -> None:
        """See `PeerNetwork.meet`."""
        self._ranks.meet(peers)

    def forget(self, scope: str) -> None:
        """See `PeerNetwork.forget`."""
        self._ranks.drop(scope, True)
