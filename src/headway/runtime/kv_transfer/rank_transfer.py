"""One rank's end of KV transfers: it sends and receives its own heads, over connections of its own.

Requests for transfers come between plans, and within span tasks, in the rank's own thread. A slice of a request that is
still being computed follows chunk by chunk, or layer by layer of a task, as this rank computes it, without a message of
the engine. Arrivals are reported at once by a thread of their own, whatever the rank computes meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from headway.core.batch import GroupBatch
from headway.runtime.engine.instance_protocol import KvArrived, MeetPeers, ReserveKv, SendKv, SpanTaskLost
from headway.runtime.engine.protocol import AbortRequest
from headway.runtime.executor.messages import InstanceFromRank, InstanceToRank
from headway.runtime.executor.rank_config import RankPeer
from headway.runtime.executor.worker import ModelWorker
from headway.runtime.kv_transfer.connector import SaveKv, make_connector
from headway.runtime.kv_transfer.peers import PeerNetwork
from headway.runtime.kv_transfer.pool_port import KvPort
from headway.runtime.kv_transfer.rank_routes import end_of, heads_of
from headway.runtime.kv_transfer.resharding_connector import ReshardingConnector
from headway.runtime.model.config import DecoderConfig
from headway.runtime.sequence_parallel.rank_span_executor import RankSpanExecutor
from headway.runtime.sequence_parallel.span_executor import SpanExecutor

_NO_LIFE = -1
_NO_NAME = ""


class RankKvTransfer:
    """The KV transfers of one tensor-parallel rank.

    `say` and `aside` send a message to the engine, the latter from any thread. ConfigError for an address that it
    cannot have, and an unknown connector.
    """

    def __init__(
        self,
        worker: ModelWorker,
        config: DecoderConfig,
        eos: tuple[int, ...],
        block_tokens: int,
        peer: RankPeer,
        say: Callable[[InstanceFromRank], None],
        aside: Callable[[InstanceFromRank], None],
    ) -> None:
        """config: the whole model's."""
        self._worker, self._say, self._aside = worker, say, aside
        shard = worker.decoder.shard
        self._peers = PeerNetwork(
            end_of(peer.number, shard.rank), peer.incarnation, peer.address(shard.rank), peer.secret
        )
        self._rung = threading.Event()
        self._ends = False
        inner = make_connector(peer.connector, self._peers, self._rung.set)
        connector = ReshardingConnector(inner, config.kv_heads, self._peers.ranks_of, shard.rank, shard.ranks)
        heads = heads_of(config.kv_heads, shard.ranks, shard.rank)
        runs = SpanExecutor(worker, self._peers, eos, config)
        self._port = KvPort(worker, block_tokens, runs, connector, self._peers.number, heads)
        self.runs = RankSpanExecutor(runs, self._port, say)
        worker.on_free = self._leaving
        self._names: dict[str, str] = {}
        self._computed: dict[str, int] = {}
        self._lives: dict[str, int] = {}
        self._teller = threading.Thread(target=self._tell, name="kv aside", daemon=True)
        self._teller.start()

    @property
    def address(self) -> str:
        """Where other instances find this rank."""
        return self._peers.address

    def on_message(self, said: InstanceToRank, prompt: memoryview | None) -> None:
        """The engine's word, in order with the plans that have been carried out. prompt: the frame behind
        `SubmitRequest`."""
        if isinstance(said, MeetPeers):
            self._peers.meet(said.peers)
        elif isinstance(said, ReserveKv):
            self._names[str(said.number)] = said.id
            self._lives[said.id] = said.serial
            self._port.receive(said.id, said.tokens, self._worker.tables.runs(str(said.number)))
            self._say(said)
        elif isinstance(said, SendKv):
            owner = str(said.number)
            if said.number:
                self._names[owner] = said.id
            self._port.send(SaveKv(said.id, said.piece, said.to), said.start, said.end)
            self._port.layers_are_there(said.id)
            self._advance(owner, max(said.there, self._computed.get(owner, 0)))
        elif isinstance(said, AbortRequest) and said.number is None:
            if said.for_good:
                self._peers.forget(said.id)
            self._port.forget(said.id)
            self.runs.forget(said.id)
            self._lives.pop(said.id, None)
            self._names = {owner: name for owner, name in self._names.items() if name != said.id}
        else:
            if isinstance(said, AbortRequest) and said.number:
                self._names[str(said.number)] = said.id
            self.runs.on_message(said, prompt)

    def computed(self, part: GroupBatch) -> None:
        """A part has been computed here: what it added may go."""
        for chunk in part.prefills:
            self._computed[chunk.request] = chunk.start + chunk.tokens
            self._advance(chunk.request, chunk.start + chunk.tokens)

    def close(self) -> None:
        """Nothing comes or goes any more."""
        self._ends = True
        self._rung.set()
        self._teller.join()
        self._port.close()
        self._peers.close()

    def _advance(self, owner: str, tokens: int) -> None:
        name = self._names.get(owner, _NO_NAME)
        if tokens and name in self._port.sending():
            self._port.tokens_are_there(name, tokens, self._worker.tables.runs(owner))

    def _leaving(self, owner: str) -> None:
        """A request's blocks are about to be others'."""
        self._computed.pop(owner, None)
        name = self._names.get(owner)
        if name is not None:
            self._port.settle(name)

    def _tell(self) -> None:
        while True:
            self._rung.wait()
            self._rung.clear()
            if self._ends:
                return
            received, lost = self._port.finished()
            for one in received:
                serial = self._lives.get(one.request, _NO_LIFE)  # before it is asked whether that one's is whole
                self._aside(KvArrived(*one, whole=not self._port.awaits(one.request), serial=serial))
            for each in lost:
                self._aside(SpanTaskLost(*each, transfer=True))
