"""The engine's end of KV transfers where the instance is several processes: each rank moves its own KV, counted here.

Room is there when all ranks have opened theirs, and a piece has come when all have theirs of it. What ranks say of runs
goes on to `computes`. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from headway.core.batch import KvOp
from headway.runtime.engine.instance_protocol import KvArrived, MeetPeers, ReserveKv, SendKv, SpanTaskLost
from headway.runtime.engine.protocol import AbortRequest
from headway.runtime.executor.messages import InstanceFromRank
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.kv_transfer.connector import FinishedTransfers, KvLost, KvReceived, SaveKv
from headway.runtime.kv_transfer.peer import PeerAddress
from headway.runtime.sequence_parallel.multi_rank_span_executor import MultiRankSpanExecutor

Slots = Sequence[tuple[int, int]]


class MultiRankKvTransfer:
    """`KvPoolPort` over the ranks of an executor.

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
        self._received: list[KvReceived] = []
        self._lost: list[KvLost] = []
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

    def finished(self) -> FinishedTransfers:
        """See `KvPort.finished`."""
        received, self._received = self._received, []
        lost, self._lost = self._lost, []
        return FinishedTransfers(received, lost)

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
            self._lost.append(KvLost(said.id, said.why, said.by))
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
            self._received.append(KvReceived(said.id, said.piece, said.source, began_s, ended_s))


class MultiRankPeers:
    """`PeerTable` over the ranks of instance `number`, which have the connections."""

    def __init__(self, number: int, ranks: MultiRankKvTransfer) -> None:
        self.number, self._ranks = number, ranks

    def meet(self, peers: Iterable[PeerAddress]) -> None:
        """See `PeerNetwork.meet`."""
        self._ranks.meet(peers)

    def forget(self, scope: str) -> None:
        """See `PeerNetwork.forget`."""
        self._ranks.drop(scope, True)
