"""Point to point between the instances of a cluster: one connection for each pair, threads that never wait for ever.

Messages belong to a *scope*, the request that they are about, and arrive in order within a *stream* of it. Two ways to
receive: `expect` gives the buffer for the next message of a stream; a *pushed* message is given to a handler, which
returns its place. A message that comes before it is expected is kept.

Of two instances the one with the higher number connects. A cut connection is re-established, but its messages are not
repeated: every `PeerStream` over the old one raises PeerLostError, and its user starts again under another scope.
"""

from __future__ import annotations

import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from headway.core.errors import ConfigError
from headway.runtime.kv_transfer.completion import TransferCompletion
from headway.runtime.kv_transfer.connection import Buffer, PeerConnection, SendRoom
from headway.runtime.kv_transfer.frames import FrameKind, greet
from headway.runtime.kv_transfer.incoming_frames import Handler, ReceivePlace
from headway.runtime.kv_transfer.peer import PeerAddress, PeerLostError, listen, prepare, reach
from headway.runtime.kv_transfer.rank_routes import named
from headway.runtime.kv_transfer.shared_buffer import ARENA_BYTES, exchange

__all__ = [
    "Buffer",
    "Handler",
    "PeerAddress",
    "PeerLostError",
    "PeerNetwork",
    "PeerStream",
    "ReceivePlace",
    "SendRoom",
    "TransferCompletion",
]

_GREETING_S = 5.0
_AGAIN_S = 0.1
_LOOK_S = 0.25
_REMEMBERED = 65536
"""Scopes that are kept in mind after `forget`, so that stragglers are dropped."""


class PeerNetwork:
    """The connections of one instance, or of one of its ranks (`ends`).

    `address`: where it listens, and then, with the port, where it is found.

    Made before its address is sent to the others, whose addresses come with `meet`. `secret`: shared by all
    instances; over sockets in a folder that only one user can enter it may be empty. `arena_bytes`: of the memory
    through which bodies go to each end on this host; 0: all through sockets. Raises ConfigError. Any thread
    may call anything.
    """

    def __init__(
        self, number: int, incarnation: int, address: str, secret: bytes = b"", arena_bytes: int = ARENA_BYTES
    ) -> None:
        self.number, self.incarnation = number, incarnation
        self._secret, self._arena_bytes = secret, arena_bytes
        self._listener, self.address = listen(address)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._table: dict[int, PeerAddress] = {}
        self._ranks: dict[int, int] = {}
        self._connections: dict[int, PeerConnection] = {}
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._handler: Handler | None = None
        self._hears: list[Callable[[int, str], None]] = []
        self._start(self._accept, "peers")

    def meet(self, peers: Iterable[PeerAddress]) -> None:
        """All instances that are there now (this one may be among them: its other ranks are met too). Connections to
        lives that are not named any more end; those to new ones are made."""
        peers = tuple(peers)
        table = {end.instance: end for peer in peers for end in peer.ends() if end.instance != self.number}
        with self._lock:
            self._ranks = {peer.instance: 1 + len(peer.others) for peer in peers}
            known, self._table = self._table, table
            gone = [connection for connection in self._connections.values() if self._left(connection, known)]
        for connection in gone:
            connection.end(f"{named(connection.instance)} has left the cluster, or was started again")
        with self._lock:
            for peer in table.values():
                if peer.instance not in self._connections:
                    self._begin(peer)

    def ranks_of(self, instance: int) -> int:
        """How many ends an instance has, as far as it was met."""
        with self._lock:
            return self._ranks.get(instance, 1)

    def _left(self, connection: PeerConnection, known: Mapping[int, PeerAddress]) -> bool:
        """Whether the table says that this life of an instance is over. One that greeted before it was named stays."""
        peer = self._table.get(connection.instance)
        return connection.instance in known if peer is None else peer.incarnation > connection.incarnation

    def handle(self, handler: Handler) -> None:
        """Set the handler of pushed messages. Called before the first `meet`."""
        self._handler = handler

    def on_lost(self, hear: Callable[[int, str], None]) -> None:
        """`hear(instance, why)` is called in some thread when a connection that was up has ended. It must not block."""
        self._hears.append(hear)

    def line(self, scope: str, members: Iterable[int]) -> PeerStream:
        """Connections to some instances as they are now. Raises PeerLostError for one that was never met."""
        with self._lock:
            try:
                return PeerStream(scope, {n: self._connections[n] for n in members if n != self.number})
            except KeyError as error:
                raise PeerLostError(f"{named(error.args[0])} is not here", error.args[0]) from None

    def push(self, to: int, scope: str, note: bytes, buffers: Sequence[Buffer]) -> TransferCompletion:
        """Send a body that the other side's handler finds a place for. The ticket: `buffers` may be changed."""
        return self.line(scope, (to,)).push(to, note, buffers)

    def forget(self, scope: str) -> None:
        """End a scope for good: its waits raise PeerLostError, and its late messages are dropped.

        Nothing is written to the places of its messages any more once this has returned.
        """
        with self._lock:
            self._forgotten[scope] = None
            if len(self._forgotten) > _REMEMBERED:
                self._forgotten.popitem(last=False)
            connections = list(self._connections.values())
        for connection in connections:
            connection.forget(scope, f"{scope} was forgotten")

    def cease(self, scope: str) -> None:
        """The handler wants nothing more of a scope for now: what it has given a place is not written there any more
        once this has returned. All else goes on, and the scope may come again."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.cease(scope)

    def close(self) -> None:
        """End all connections and wake all waiting threads. Harmless when repeated."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections.values())
            self._table = {}
        for connection in connections:
            connection.end("this instance ends")

    # -- making connections -------------------------------------------------------------------------------------------

    def _begin(self, peer: PeerAddress, after_s: float = 0.0) -> PeerConnection:
        """A new connection to a peer, in place of whatever was there. Under the lock."""
        connection = PeerConnection(
            peer.instance, peer.incarnation, lambda: self._handler, self._forgotten.__contains__, self._over
        )
        self._connections[peer.instance] = connection
        if peer.address and not self._closed.is_set():
            body = self._reach if self.number > peer.instance else self._await
            self._start(lambda: body(peer, connection, after_s), f"peer {peer.instance}")
        return connection

    def _reach(self, peer: PeerAddress, connection: PeerConnection, after_s: float) -> None:
        """The thread of a connection that is made from here."""
        if self._closed.wait(after_s) or connection.ended is not None:
            return None
        try:
            other = reach(peer.address, _GREETING_S)
        except (OSError, ConfigError) as error:
            return connection.end(f"{named(peer.instance)} cannot be reached: {error}")
        try:
            if greet(other, self.number, self.incarnation, self._secret) != (peer.instance, peer.incarnation):
                raise PeerLostError("another process answers there")
            arenas = exchange(other, self._arena_bytes)
        except (OSError, PeerLostError) as error:
            other.close()
            return connection.end(f"{named(peer.instance)} cannot be reached: {error}")
        prepare(other)
        return connection.serve(other, *arenas)

    def _await(self, peer: PeerAddress, connection: PeerConnection, after_s: float) -> None:
        """Check that a peer which is to connect to this instance can be reached at all, until it has connected."""
        while not self._closed.wait(after_s + _LOOK_S) and connection.ended is None and not connection.served:
            try:
                reach(peer.address, _GREETING_S).close()
            except (OSError, ConfigError) as error:
                connection.end(f"{named(peer.instance)} cannot be reached: {error}")

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                other, _ = self._listener.accept()
            except OSError:  # closed, or out of descriptors for now
                if self._closed.wait(_AGAIN_S) or self._listener.fileno() < 0:
                    return
                continue
            self._start(lambda other=other: self._welcome(other), "peer")  # type: ignore[misc]

    def _welcome(self, other: socket.socket) -> None:
        """The thread of a connection that was made from elsewhere."""
        try:
            other.settimeout(_GREETING_S)
            number, incarnation = greet(other, self.number, self.incarnation, self._secret)
            arenas = exchange(other, self._arena_bytes)
        except (OSError, PeerLostError):
            other.close()
            return
        with self._lock:
            current = self._connections.get(number)
            old = current is not None and current.incarnation > incarnation
            if number < self.number or old or self._closed.is_set():
                other.close()
                return
            # A connection object of this incarnation may be waiting for its socket: frames are queued on it already.
            waits = current is not None and current.incarnation == incarnation and current.ended is None
            if current is None or not waits or current.up:
                fresh = self._begin(PeerAddress(number, incarnation, ""))
            else:
                fresh, current = current, None
        if current is not None:
            current.end(f"{named(number)} has made another connection")
        prepare(other)
        fresh.serve(other, *arenas)

    def _over(self, connection: PeerConnection, why: str) -> None:
        """A connection has ended: make another where the peer is still one."""
        with self._lock:
            number = connection.instance
            if self._connections.get(number) is connection:
                del self._connections[number]
                peer = self._table.get(number)
                if peer is not None and peer.incarnation >= connection.incarnation:
                    self._begin(peer, _AGAIN_S if peer.incarnation == connection.incarnation else 0.0)
        if connection.served:
            for hear in self._hears:
                hear(connection.instance, why)

    def _start(self, body: Callable[[], None], name: str) -> None:
        threading.Thread(target=body, name=name, daemon=True).start()


class PeerStream:
    """What one scope uses between some instances, for as long as none of the connections has been cut."""

    def __init__(self, scope: str, connections: Mapping[int, PeerConnection]) -> None:
        self.scope = scope
        self._connections = connections

    def send(self, to: int, lane: int, buffers: Sequence[Buffer]) -> TransferCompletion:
        """One message for `expect` on the other side. The ticket: `buffers` may be changed."""
        return self._connections[to].send(FrameKind.DATA, lane, self.scope, b"", buffers)

    def expect(self, source: int, lane: int, into: memoryview) -> TransferCompletion:
        """The next message of a lane, which has the size of `into`. The ticket: it is there."""
        return self._connections[source].expect(lane, self.scope, into)

    def push(self, to: int, note: bytes, buffers: Sequence[Buffer]) -> TransferCompletion:
        """See `PeerNetwork.push`."""
        return self._connections[to].send(FrameKind.PUSH, 0, self.scope, note, buffers)

    def room(self, to: int, size: int, again: Callable[[], None]) -> SendRoom | None:
        """See `PeerConnection.room`; the body is for `push_from` or `drop`."""
        return self._connections[to].room(size, again)

    def push_from(self, to: int, note: bytes, room: SendRoom) -> TransferCompletion:
        """See `PeerConnection.push`."""
        return self._connections[to].push(self.scope, note, room)

    def drop(self, to: int, room: SendRoom) -> None:
        """See `PeerConnection.drop`."""
        self._connections[to].drop(room)

    def check(self) -> None:
        """Raise PeerLostError when a connection has ended."""
        for connection in self._connections.values():
            if connection.ended is not None:
                raise PeerLostError(connection.ended, connection.instance)
