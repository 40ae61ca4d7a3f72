"""What timed instances tell each other, over the real sockets between instances: pieces without their bytes, and that
a run has been paused (real instances find that out from what they exchange while they compute)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from headway.runtime.engine.protocol import PeerLostError
from headway.runtime.kv_transfer.connector import FinishedTransfers, KvLost, KvReceived
from headway.runtime.kv_transfer.peers import PeerNetwork


class TimedArrival(msgspec.Struct, frozen=True, tag=True):
    """A piece is there."""

    piece: int
    began_s: float
    ended_s: float


class TimedStop(msgspec.Struct, frozen=True, tag=True):
    """The run of the group stops where so many layers of its pieces are done."""

    edge: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TimedArrival | TimedStop)


class TimedMail:
    """Of one instance. It is who takes what is pushed to these peers. Any thread may call anything."""

    def __init__(self, peers: PeerNetwork, ring: Callable[[], None]) -> None:
        """`ring`: there is something to look at."""
        self.peers, self.ring = peers, ring
        self._gate = threading.Lock()
        self._received: list[KvReceived] = []
        self._lost: list[KvLost] = []
        self._stopped: dict[str, int] = {}
        peers.handle(self._handle)

    def post(self, to: int, request: str, note: TimedArrival | TimedStop) -> None:
        """Tell another instance, or this one itself."""
        if to == self.peers.number:
            self._take(to, request, note)
            return
        try:
            self.peers.push(to, request, _encoder.encode(note))
        except PeerLostError as error:
            with self._gate:
                self._lost.append(KvLost(request, str(error)))
            self.ring()

    def finished(self) -> FinishedTransfers:
        """Pieces that have come, and requests of which something could not go, since the last look."""
        with self._gate:
            found, self._received, self._lost = FinishedTransfers(self._received, self._lost), [], []
        return found

    def stopped(self, request: str) -> int | None:
        """Where a request's run was stopped (`TimedStop.edge`); said once."""
        with self._gate:
            return self._stopped.pop(request, None)

    def forget(self, request: str) -> None:
        """It is of no interest any more."""
        with self._gate:
            self._stopped.pop(request, None)

    def _handle(self, source: int, request: str, note: bytes, body: memoryview) -> None:
        self._take(source, request, _decoder.decode(note))

    def _take(self, source: int, request: str, note: TimedArrival | TimedStop) -> None:
        with self._gate:
            if isinstance(note, TimedArrival):
                self._received.append(KvReceived(request, note.piece, source, note.began_s, note.ended_s))
            else:
                self._stopped[request] = note.edge
        self.ring()
