"""The scheduler's side of KV transfers: reservations for KV that will arrive, in order of request, and what has arrived
or may be sent.

Implements `instance_agent.KvTransferManager` over a port, the worker's side. The place of a request's KV follows from
its owner: the scheduler (as far as it has computed), `StagedKv` (all of it), or span tasks (layer by layer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headway.core.batch import KvOp
from headway.core.clock import ClockProtocol
from headway.core.errors import RequestError
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.instance_protocol import (
    FromInstance,
    KvArrived,
    ReserveKv,
    SendKv,
    SpanTaskLost,
)
from headway.runtime.kv_transfer.connector import FinishedTransfers, SaveKv
from headway.runtime.kv_transfer.rank_routes import instance_of

_UNTOLD = 1024
"""Number of KV operations that may wait for a batch to carry them; with more they are replayed without one."""


class KvPoolPort(Protocol):
    """The worker's side: see `runtime.kv_transfer.pool_port.KvPort`."""

    def receive(self, request: str, tokens: int, blocks: Sequence[tuple[int, int]]) -> None: ...

    def awaits(self, request: str) -> bool: ...

    def send(self, save: SaveKv, start: int, end: int) -> None: ...

    def sending(self) -> list[str]: ...

    def layers_are_there(self, request: str) -> None: ...

    def tokens_are_there(self, request: str, tokens: int, blocks: Sequence[tuple[int, int]]) -> None: ...

    def settle(self, request: str) -> None: ...

    def opened(self) -> list[str]: ...

    def finished(self) -> FinishedTransfers: ...

    def forget(self, request: str) -> None: ...


class KvConnectorScheduler:
    """The KV transfers of one engine."""

    def __init__(
        self, core: EngineCore, port: KvPoolPort, replay: Callable[[tuple[KvOp, ...]], None], clock: ClockProtocol
    ) -> None:
        """replay: the executor's, for KV operations that no batch carries."""
        staged_kv = core.scheduler.staged_kv
        assert staged_kv is not None, "KV does not move between instances of several KV groups"
        self._scheduler, self._staged_kv, self._block_manager = (
            core.scheduler,
            staged_kv,
            core.scheduler.block_managers[0],
        )
        self._port, self._replay, self._clock = port, replay, clock
        self._asked: dict[str, ReserveKv] = {}
        self._words: list[FromInstance] = []
        self._came: dict[str, int] = {}
        self.settle, self.layers_are_there = port.settle, port.layers_are_there
        core.kv_incomplete = self.kv_incomplete

    def take(self, message: ReserveKv | SendKv) -> None:
        """See `KvTransferManager.take`."""
        name = message.id
        # What is there already goes at once; the rest follows as `turn` and `layers_are_there` find more.
        if isinstance(message, SendKv):
            self._port.send(SaveKv(name, message.piece, message.to), message.start, message.end)
            self._advance(name)
            return
        try:
            self._staged_kv.request(name, message.tokens, self._clock.now())
            self._asked[name] = message
        except RequestError as error:
            self._words.append(SpanTaskLost(name, str(error)))

    def granted(self, name: str) -> None:
        """See `KvTransferManager.granted`."""
        self._came[name] = self._asked[name].tokens
        self._port.receive(name, self._asked[name].tokens, self._block_manager.where(name))

    def kv_incomplete(self, name: str, tokens: int) -> bool:
        """Whether KV of the first `tokens` tokens is missing for a decode that is about to begin.

        If nothing is missing, the KV becomes the scheduler's, which extends it.
        """
        if self._port.awaits(name) or self._came.get(name, tokens) < tokens:
            return True
        self._came.pop(name, None)
        return False

    def turn(self) -> list[FromInstance]:
        """See `KvTransferManager.turn`."""
        for name in self._port.sending():
            self._advance(name)
        received, lost = self._port.finished()
        # `ReserveKv` only once the worker's side is open: a sender may push as soon as it is sent.
        words, self._words = self._words, []
        words += [self._asked.pop(name) for name in self._port.opened() if name in self._asked]
        words += [KvArrived(*one) for one in received]
        words += [SpanTaskLost(one.request, one.why, None if one.end is None else instance_of(one.end)) for one in lost]
        if self._block_manager.pending_ops > _UNTOLD:
            self._replay(self._block_manager.drain_ops())
        return words

    def forget(self, name: str) -> None:
        """See `KvTransferManager.forget`."""
        self._asked.pop(name, None)
        self._came.pop(name, None)
        self._port.forget(name)

    def _advance(self, name: str) -> None:
        """Send the available part of the slices that were requested."""
        # A scheduled request first: its staged KV, if it had any, has become the scheduler's.
        if name in self._scheduler:
            self._port.tokens_are_there(name, self._scheduler.progress(name), self._block_manager.where(name))
        elif (lease := self._staged_kv.lease(name)) is not None and not self._port.awaits(name):
            self._port.tokens_are_there(name, lease.tokens, self._block_manager.where(name))
        else:
            self._port.layers_are_there(name)
