"""The engine's end of KV transfers where the instance is several processes: each rank moves its own KV, counted here.

Room is there when all ranks have opened theirs, and a piece has come when all have theirs of it. What ranks say of runs
goes on to `computes`. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headway.core.batch import KvOp
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.kv_transfer.connector import FinishedTransfers, KvLost, KvReceived, SaveKv
from headway.runtime.kv_transfer.peer import PeerAddress
from headway.runtime.kv_transfer.rank_notes import (
    NOBODY,
    RankDrop,
    RankHolds,
    RankLost,
    RankMeet,
    RankReceived,
    RankReserve,
    RankReserved,
    RankSend,
    ToRank,
)
from headway.runtime.sequence_parallel.multi_rank_span_executor import MultiRankSpanExecutor
from headway.runtime.sequence_parallel.span_messages import encode, from_rank

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
        self._coming: dict[tuple[str, int, int], dict[int, RankReceived]] = {}
        self._received: list[KvReceived] = []
        self._lost: list[KvLost] = []
        self.computes = MultiRankSpanExecutor(executor, untold)
        executor.on_control = self._hear

    def meet(self, peers: Iterable[PeerAddress]) -> None:
        """See `PeerNetwork.meet`."""
        self._tell(RankMeet(tuple(peers)))

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
        self._tell(RankReserve(request, number, tokens, self._life))

    def opened(self) -> list[str]:
        """Requests of which room has been made since the last call."""
        names, self._opened = self._opened, []
        return names

    def awaits(self, request: str) -> bool:
        """See `KvPort.awaits`."""
        return bool(self._awaited.get(request))

    def send(self, save: SaveKv, start: int, end: int) -> None:
        """See `KvPort.send`."""
        number = self._executor.number(save.request)
        self._tell(RankSend(save.request, number or NOBODY, save.piece, save.to, start, end))

    def sending(self) -> list[str]:
        """Nothing: ranks see by themselves when more is there."""
        return []

    def layers_are_there(self, request: str) -> None:
        """Ranks see by themselves."""

    def tokens_are_there(self, request: str, tokens: int, blocks: Slots) -> None:
        """See `KvPort.tokens_are_there`: called once behind `send`. What ranks compute later they see by themselves."""
        number = self._executor.number(request)
        if number is not None:
            self._tell(RankHolds(number, tokens))

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
        self._tell(RankDrop(request, for_good))

    # -- what ranks say -----------------------------------------------------------------------------------------------

    def _hear(self, rank: int, body: bytes) -> None:
        said = from_rank.decode(body)
        # Late messages of an earlier reservation under the same name must not count for this one.
        if isinstance(said, RankReserved | RankReceived) and said.life != self._lives.get(said.name):
            return
        if isinstance(said, RankReserved):
            closed = self._closed.get(said.name, set())
            closed.discard(rank)
            if self._closed.get(said.name) == set():
                del self._closed[said.name]
                self._opened.append(said.name)
        elif isinstance(said, RankReceived):
            self._came(rank, said)
        elif isinstance(said, RankLost):
            self._lost.append(KvLost(said.name, said.why, said.end))
        else:
            self.computes.on_message(rank, said)

    def _came(self, rank: int, said: RankReceived) -> None:
        if said.name not in self._awaited:
            return
        if said.whole:
            self._awaited[said.name].discard(rank)
        come = self._coming.setdefault((said.name, said.piece, said.source), {})
        come[rank] = said
        if come.keys() == self._ranks:
            del self._coming[said.name, said.piece, said.source]
            began_s, ended_s = min(one.began_s for one in come.values()), max(one.ended_s for one in come.values())
            self._received.append(KvReceived(said.name, said.piece, said.source, began_s, ended_s))

    def _tell(self, word: ToRank) -> None:
        self._executor.send_control(encode(word))


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
