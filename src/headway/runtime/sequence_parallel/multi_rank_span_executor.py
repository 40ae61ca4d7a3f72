"""The engine's side of span tasks where the instance is several processes: directs the ranks' parts. No torch.

Each call sends a message to all ranks and returns when all have answered; the loop's own work is done in between. Ranks
give the same kinds of answers in the same order, because their parts of a task have the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from headway.core.batch import KvOp
from headway.core.errors import HeadwayError, InvariantError
from headway.core.executor import EmittedToken
from headway.core.sampling import SamplingParams
from headway.core.span import SpanTask
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.kv_transfer.peer import PeerLostError
from headway.runtime.kv_transfer.rank_notes import NOBODY
from headway.runtime.sequence_parallel.span_messages import (
    AdmitSpan,
    BeginSpan,
    ContinueSpan,
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
    encode,
)

Slots = Sequence[tuple[int, int]]
W = TypeVar("W", bound=RunFromRank)

_WAIT_S = 0.005
"""Interval between two calls of the loop's `look` while ranks compute."""


class SpanTaskError(HeadwayError):
    """A span cannot be completed: a rank has reported so."""


class MultiRankSpanExecutor:
    """`SpanExecutor` of an instance of several ranks, with the same contract.

    pending_ops: returns KV operations that no batch has carried yet; ranks must replay them before they write to the
    blocks.
    """

    def __init__(self, executor: MultiProcessExecutor, pending_ops: Callable[[], tuple[KvOp, ...]]) -> None:
        self._executor, self._pending_ops = executor, pending_ops
        self._ranks = executor.layout.accelerators
        self._known: set[str] = set()
        self._whole: dict[str, int] = {}
        self._saved: dict[str, SpanHalted] = {}
        self._looks: dict[str, Callable[[], None]] = {}
        self._name = ""
        self._replies: dict[int, RunFromRank] = {}

    def on_message(self, rank: int, reply: RunFromRank) -> None:
        """Record a rank's answer. Answers about other requests than the current one are ignored."""
        # The first answer of a rank counts, but a failure replaces an answer given before it.
        if reply.name == self._name and (rank not in self._replies or isinstance(reply, SpanBroken)):
            self._replies[rank] = reply

    def admit(self, name: str, prompt: memoryview, params: SamplingParams, output: tuple[int, ...]) -> None:
        """See `SpanExecutor.admit`."""
        self._known.add(name)
        self._send_all(AdmitSpan(name, bytes(prompt), params, output))

    def begin(
        self,
        name: str,
        run: SpanTask,
        before: Sequence[SpanTask],
        preemptible: bool,
        drawn: tuple[int, ...],
        allocate_slots: Callable[[int, bool], Slots],
        look: Callable[[], None],
    ) -> None:
        """See `SpanExecutor.begin`."""
        self._looks[name] = look
        self._whole.pop(name, None)
        replies = self._ask(BeginSpan(name, run, tuple(before), preemptible, drawn))
        while isinstance(replies[0], WantSlots):
            wants = _all(replies, WantSlots)
            # Ranks ask for the same number of slots, or for fewer where their shares differ by a token.
            slots = allocate_slots(max(one.tokens for one in wants), wants[0].replace)
            # Ranks must own the blocks before the slots are granted; both messages keep their order.
            self._executor.replay(self._pending_ops())
            replies = self._ask(GrantSlots(name, tuple(slots)))
        _all(replies, SpanBegun)

    def go(
        self, name: str, pause: Callable[[], bool] | None, behind: Callable[[int], None], concurrent: bool = False
    ) -> bool:
        """See `SpanExecutor.go`. `behind` is called only with `concurrent`, where plans are carried out between
        layers."""
        wanted = pause or _never
        held = wanted()

        def asked() -> None:
            nonlocal held
            if not held and wanted():
                held = True
                self._send_all(HoldSpan(name))

        replies = self._ask(StartSpan(name, held, concurrent), asked)
        while isinstance(replies[0], LayerEdge):
            behind(_all(replies, LayerEdge)[0].layers)
            replies = self._ask(ContinueSpan(name), asked)
        if isinstance(replies[0], SpanComputed):
            _all(replies, SpanComputed)
            return True
        stopped = _all(replies, SpanHalted)
        self._saved[name] = SpanHalted(
            name,
            stopped[0].tokens,
            stopped[0].layer,
            sum(one.kv_bytes for one in stopped),
            sum(one.activation_bytes for one in stopped),
            sum(one.kv_bytes_at_end for one in stopped),
        )
        return False

    def finish(self, name: str, draw: bool) -> tuple[EmittedToken | None, bool]:
        """See `SpanExecutor.finish`."""
        ended = _all(self._ask(FinishSpan(name, draw)), SpanEnded)
        # KV is whole only as far as every rank has its heads of it.
        self._whole[name] = min(one.whole for one in ended)
        return ended[0].emitted, any(one.moved for one in ended)

    def saved(self, name: str) -> tuple[int, int, SpanHalted]:
        """See `SpanExecutor.saved`."""
        halted = self._saved.pop(name)
        return halted.tokens, halted.layer, halted

    def whole(self, name: str, tokens: int) -> bool:
        """See `SpanExecutor.whole`."""
        return self._whole.get(name) == tokens

    def check(self, name: str) -> None:
        """Do nothing: ranks check their peers themselves and report a loss as `SpanBroken`."""

    def forget(self, name: str) -> None:
        """See `SpanExecutor.forget`."""
        if name not in self._known:
            return
        if self._whole.pop(name, None):  # it may have become the request's own, under the number that its blocks have
            self._executor.replay(self._pending_ops())
        self._known.discard(name)
        self._saved.pop(name, None)
        self._looks.pop(name, None)
        self._send_all(SuspendRequest(name, self._executor.number(name) or NOBODY))

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def _ask(self, message: RunToRank, meanwhile: Callable[[], None] = lambda: None) -> list[RunFromRank]:
        """Send a message to all ranks and return their answers, by rank.

        Raises SpanTaskError or PeerLostError where a rank cannot go on, LostError, and whatever `look` raises.
        """
        self._name, self._replies = message.name, {}
        look = self._looks[message.name]
        self._send_all(message)
        while True:
            for reply in self._replies.values():
                if isinstance(reply, SpanBroken):
                    raise SpanTaskError(reply.why) if reply.end is None else PeerLostError(reply.why, reply.end)
            if len(self._replies) == self._ranks:
                return [self._replies[rank] for rank in range(self._ranks)]
            self._executor.poll(_WAIT_S)
            meanwhile()
            look()

    def _send_all(self, message: RunToRank) -> None:
        self._executor.send_control(encode(message))


def _all(replies: Sequence[RunFromRank], kind: type[W]) -> list[W]:
    """Return the answers as the kind that all must have. Raises InvariantError otherwise."""
    alike: list[W] = [reply for reply in replies if isinstance(reply, kind)]
    if len(alike) < len(replies):
        raise InvariantError(f"ranks of one instance differ in a run: {replies}")
    return alike


def _never() -> bool:
    return False
