"""The connections of one process to its peers: handlers, streams and their epochs, and the sockets below.

Messages belong to a *scope*, the request that they are about. Two ways to receive: `expect` gives the buffer for the
next message of one of its lanes; a *pushed* message is given to a handler. A message that comes before it is expected
is kept.

Every connection between two peers has a *term*, an epoch number sent in each header. After a reconnect one peer greets
the other with the next term, older messages are dropped, and every `PeerStream` of an older term raises PeerLostError.
So within a term no message is repeated and none is missing.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import IntEnum

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from headway.core.errors import ConfigError
from headway.runtime.engine.protocol import PeerAddress, PeerLostError, endpoint, named
from headway.runtime.launcher.processes import guard_client, guard_server

# One way to one incarnation of another end: a ZeroMQ socket for what leaves, and what is expected from there.
#
# A connection ends once and is never repaired: ZeroMQ's own reconnection is off, because it would lose messages without
# a word. Its successor has a higher *term* (`peers`).

Buffer = memoryview | bytes | bytearray


class FrameKind(IntEnum):
    HELLO = 0
    """The first of a term; `note` is where the sender is reached."""
    DATA = 1
    PUSH = 2


class FrameHead(msgspec.Struct, frozen=True, array_like=True):
    """Frame header. `life`, `target_life`: incarnations of sender and receiver."""

    source: int
    life: int
    target_life: int
    term: int
    kind: int
    scope: str
    lane: int
    note: bytes


_encode = msgspec.msgpack.Encoder().encode


class ReceiveTicket:
    """Completion handle of a receive from peer `end`."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._why: str | None = None
        self._over = threading.Event()

    def wait(self, look: Callable[[], None] | None = None, every_s: float = 0.02) -> None:
        """Return when the message has arrived; raise PeerLostError when the connection is lost.

        `look` is called every `every_s` seconds meanwhile; what it raises ends the wait.
        """
        while not self._over.wait(None if look is None else every_s):
            if look is not None:
                look()
        if self._why is not None:
            raise PeerLostError(self._why, self._end)

    def finish(self, why: str | None = None) -> None:
        """Complete the operation (None), or fail it with a reason. Later calls are ignored."""
        if not self._over.is_set():
            self._why = why
            self._over.set()


class SendTicket:
    """Completion handle of a send. When it is done, the caller may reuse the buffer."""

    def __init__(self, connection: PeerConnection, tracker: zmq.MessageTracker) -> None:
        self._connection, self._tracker = connection, tracker

    def wait(self, look: Callable[[], None] | None = None, every_s: float = 0.02) -> None:
        """See `ReceiveTicket.wait`."""
        while not self._tracker.done:
            try:
                self._tracker.wait(every_s)
            except zmq.NotDone:
                if look is not None:
                    look()
        if self._connection.ended is not None:  # which frees what has not left, too
            raise PeerLostError(self._connection.ended, self._connection.peer.instance)


PeerTicket = ReceiveTicket | SendTicket
"""The outcome of an operation with another end."""


class PeerConnection:
    """`out`: connected, or about to be. `forgotten`: scopes whose messages are dropped. `lost` is called once, by the
    thread that notices, with the connection and why."""

    def __init__(
        self,
        sender: tuple[int, int],
        peer: PeerAddress,
        term: int,
        out: zmq.Socket[bytes],
        forgotten: Callable[[str], bool],
        lost: Callable[[PeerConnection, str], None],
    ) -> None:
        self.peer, self.term = peer, term
        self.ended: str | None = None
        """Why nothing goes over it any more; None while something may."""
        self.up = False
        """Whether the other end was ever there."""
        self._sender, self._out, self._forgotten, self._lost = sender, out, forgotten, lost
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._wanted: dict[tuple[str, int], deque[tuple[ReceiveTicket, memoryview]]] = {}
        self._came: dict[tuple[str, int], deque[memoryview]] = {}

    @property
    def life(self) -> tuple[int, int]:
        """Incarnation and term: the higher one counts."""
        return self.peer.incarnation, self.term

    def send(self, kind: FrameKind, scope: str, lane: int, note: bytes, body: Buffer) -> PeerTicket:
        """One message, behind those before it. Never waits for the other side."""
        head = FrameHead(*self._sender, *self.life, kind, scope, lane, note)
        with self._sending:
            # What is pushed is the handlers' to drop: they keep account of it.
            why = self.ended if kind == FrameKind.PUSH else self._closed(scope)
            if why is None:
                try:
                    self._out.send(_encode(head), zmq.NOBLOCK | zmq.SNDMORE)
                    return SendTicket(self, self._out.send(body, zmq.NOBLOCK, copy=False, track=True))
                except zmq.Again:  # it could not be connected: the thread that reads is about to be told
                    why = "it cannot be reached"
        ticket = ReceiveTicket(self.peer.instance)
        ticket.finish(why)
        return ticket

    def expect(self, scope: str, lane: int, into: memoryview) -> ReceiveTicket:
        """The next message of a lane of a scope, into `into`, which has its size."""
        ticket, into = ReceiveTicket(self.peer.instance), into.cast("B")
        with self._receiving:
            why, came = self._closed(scope), self._came.get((scope, lane))
            if why is not None:
                ticket.finish(why)
            elif came:
                _fill(ticket, into, came.popleft())
            else:
                self._wanted.setdefault((scope, lane), deque()).append((ticket, into))
        return ticket

    def came(self, scope: str, lane: int, body: memoryview) -> None:
        """A message for `expect`: kept until then."""
        with self._receiving:
            if self._closed(scope) is None:
                if wanted := self._wanted.get((scope, lane)):
                    _fill(*wanted.popleft(), body)
                else:
                    self._came.setdefault((scope, lane), deque()).append(body)

    def forget(self, scope: str, why: str) -> None:
        """End the waits of a scope; no buffer of theirs is written to any more once this has returned."""
        with self._receiving:
            for key in [key for key in self._came if key[0] == scope]:
                del self._came[key]
            for key in [key for key in self._wanted if key[0] == scope]:
                for ticket, _ in self._wanted.pop(key):
                    ticket.finish(why)

    def end(self, why: str) -> None:
        """Close it, and tell all that wait. Harmless when repeated."""
        with self._sending, self._receiving:
            if self.ended is not None:
                return
            self.ended = why
            self._out.close(0)
            for wanted in self._wanted.values():
                for ticket, _ in wanted:
                    ticket.finish(why)
            self._wanted.clear()
            self._came.clear()
        self._lost(self, why)

    def _closed(self, scope: str) -> str | None:
        """Why nothing of a scope goes over it."""
        return f"{scope} was forgotten" if self._forgotten(scope) else self.ended


def _fill(ticket: ReceiveTicket, into: memoryview, body: memoryview) -> None:
    if body.nbytes != into.nbytes:
        ticket.finish(f"{body.nbytes} bytes came for {into.nbytes}")
        return
    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(body, dtype=np.uint8))  # other threads run meanwhile
    ticket.finish()


Handler = Callable[[int, str, bytes, memoryview], None]
"""(source, scope, note, body): called in the thread that reads. Must not block."""

_AGAIN_S = 0.1
_BURST = 64
"""Messages that are read before losses are looked at."""
_REMEMBERED = 65536
"""Scopes that are kept in mind after `forget`, so that stragglers are dropped."""
_decode = msgspec.msgpack.Decoder(FrameHead).decode
_names = itertools.count()


class PeerNetwork:
    """The connections of one instance, or of one of its ranks.

    Made before its address is sent to the others, whose addresses come with `meet`. `secret`: shared by all instances;
    with it, what goes over TCP is encrypted and authenticated (CURVE, keys derived from the secret). Over sockets in a
    folder that only one user can enter it may be empty. Raises ConfigError. Any thread may call anything.
    """

    def __init__(self, number: int, incarnation: int, address: str, secret: str = "") -> None:
        self.number, self.incarnation = number, incarnation
        where = endpoint(address)
        self._secret = secret if where.startswith("tcp:") else ""
        self._context = zmq.Context()
        self._inlet = self._context.socket(zmq.PULL)
        self._inlet.rcvhwm = self._inlet.linger = 0
        self.address = self._bind(address, where)
        self._bell, self._ring = socket.socketpair()
        self._ring.setblocking(False)
        self._lock = threading.RLock()
        self._closed = False
        self._table: dict[int, PeerAddress] = {}
        self._ranks: dict[int, int] = {}
        self._connections: dict[int, PeerConnection] = {}
        self._monitors: dict[zmq.Socket[bytes], PeerConnection] = {}
        self._again: list[tuple[float, PeerConnection]] = []
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._handler: Handler | None = None
        self._hears: list[Callable[[int, str], None]] = []
        self._reader = threading.Thread(target=self._run, name="peers", daemon=True)
        self._reader.start()

    def meet(self, peers: Iterable[PeerAddress]) -> None:
        """All instances that are there now (this one may be among them: its other ranks are met too). Connections to
        incarnations that are not named any more end; those to new ones are made."""
        peers = tuple(peers)
        table = {end.instance: end for peer in peers for end in peer.ends() if end.instance != self.number}
        with self._lock:
            if self._closed:
                return
            self._ranks = {peer.instance: 1 + len(peer.others) for peer in peers}
            known, self._table = self._table, table
            gone = [connection for connection in self._connections.values() if self._left(connection, known)]
        for connection in gone:
            connection.end(f"{named(connection.peer.instance)} has left the cluster, or was started again")
        moved = []
        with self._lock:
            for peer in table.values():
                current = self._connections.get(peer.instance)
                # The end of an earlier incarnation, which is not waited for any more: as if there had been none.
                if current is None or current.peer.incarnation < peer.incarnation:
                    self._begin(peer, 0)
                # It greeted before it was named, and is reached elsewhere than it says.
                elif current.peer.incarnation == peer.incarnation and current.peer.address != peer.address:
                    moved.append(current)
                    self._begin(peer, current.term + 1)
        for connection in moved:
            connection.end(f"{named(connection.peer.instance)} is reached elsewhere")

    def ranks_of(self, instance: int) -> int:
        """How many ends an instance has, as far as it was met."""
        with self._lock:
            return self._ranks.get(instance, 1)

    def near(self, end: int) -> bool:
        """Whether an end listens at an address of this one's host."""
        with self._lock:
            peer = self._table.get(end)
        host = "unix:" if self.address.startswith("unix:") else self.address.rpartition(":")[0] + ":"
        return peer is not None and peer.address.startswith(host)

    def handle(self, handler: Handler) -> None:
        """Set the handler of pushed messages. Called before the first `meet`."""
        self._handler = handler

    def on_lost(self, hear: Callable[[int, str], None]) -> None:
        """`hear(end, why)` is called in some thread when a connection has ended. It must not block."""
        self._hears.append(hear)

    def line(self, scope: str, members: Iterable[int]) -> PeerStream:
        """Connections to some ends as they are now. Raises PeerLostError for one that was never met."""
        with self._lock:
            try:
                return PeerStream(scope, {n: self._connections[n] for n in members if n != self.number})
            except KeyError as error:
                raise PeerLostError(f"{named(error.args[0])} is not here", error.args[0]) from None

    def push(self, to: int, scope: str, note: bytes, body: Buffer = b"") -> PeerTicket:
        """Send a message to the other side's handler. The ticket: `body` may be changed."""
        return self.line(scope, (to,)).push(to, note, body)

    def forget(self, scope: str) -> None:
        """End a scope for good: its waits raise PeerLostError, and what comes late for `expect` is dropped.

        Nothing is written to the buffers of its messages any more once this has returned.
        """
        with self._lock:
            self._forgotten[scope] = None
            if len(self._forgotten) > _REMEMBERED:
                self._forgotten.popitem(last=False)
            connections = list(self._connections.values())
        for connection in connections:
            connection.forget(scope, f"{scope} was forgotten")

    def close(self) -> None:
        """End all connections and wake all waiting threads. Harmless when repeated."""
        with self._lock:
            self._closed, self._table = True, {}
            connections = list(self._connections.values())
        for connection in connections:
            connection.end("this instance ends")
        self._wake()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    # -- connections --------------------------------------------------------------------------------------------------

    def _bind(self, address: str, where: str) -> str:
        """Listen. Returns where others find this end."""
        try:
            if where.startswith("tcp:"):
                host, port = address.removeprefix("tcp:").rsplit(":", 1)
                if self._secret:
                    guard_server(self._inlet, self._secret)
                self._inlet.bind(f"tcp://{socket.gethostbyname(host)}:{'*' if port == '0' else port}")
                return "tcp:" + self._inlet.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").removeprefix("tcp://")
            self._inlet.bind(where)
            return address
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(0)
            raise ConfigError(f"peer address {address!r}: {error}") from None

    def _left(self, connection: PeerConnection, known: Mapping[int, PeerAddress]) -> bool:
        """Whether the table says that this incarnation is over. One that greeted before it was named stays."""
        peer = self._table.get(connection.peer.instance)
        gone = connection.peer.instance in known
        return gone if peer is None else peer.incarnation > connection.peer.incarnation

    def _begin(self, peer: PeerAddress, term: int) -> None:
        """A new connection, in place of whatever was there. Under the lock."""
        out, monitor = self._context.socket(zmq.PUSH), self._context.socket(zmq.PAIR)
        out.sndhwm = out.linger = monitor.linger = 0
        out.reconnect_ivl = -1
        # A host that vanished is noticed in 10 s.
        out.tcp_keepalive, out.tcp_keepalive_idle, out.tcp_keepalive_intvl, out.tcp_keepalive_cnt = 1, 2, 2, 4
        out.tcp_maxrt = 10_000
        if self._secret:
            guard_client(out, self._secret)
        name = f"inproc://peer-{next(_names)}"
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        failed |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        out.monitor(name, failed | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED)
        monitor.connect(name)
        sender = self.number, self.incarnation
        connection = PeerConnection(sender, peer, term, out, self._forgotten.__contains__, self._over)
        self._connections[peer.instance] = self._monitors[monitor] = connection
        try:
            out.connect(endpoint(peer.address))
            connection.send(FrameKind.HELLO, "", 0, self.address.encode(), b"")
        except (ConfigError, zmq.ZMQError) as error:
            connection.end(f"{named(peer.instance)} cannot be reached: {error}")
        self._wake()

    def _over(self, connection: PeerConnection, why: str) -> None:
        """A connection has ended: make another where the end is still one, later where it was not there."""
        number = connection.peer.instance
        with self._lock:
            if self._connections.get(number) is connection:
                peer = self._table.get(number)
                if peer is None or peer.incarnation < connection.peer.incarnation:
                    del self._connections[number]
                elif peer.incarnation > connection.peer.incarnation:
                    self._begin(peer, 0)
                elif connection.up:
                    self._begin(peer, connection.term + 1)
                else:
                    self._again.append((time.monotonic() + _AGAIN_S, connection))
                    self._wake()
        for hear in self._hears:
            hear(number, why)

    def _wake(self) -> None:
        with suppress(OSError):  # full: it will wake
            self._ring.send(b"\0")

    # -- the thread that reads ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            poller = zmq.Poller()
            with self._lock:
                for each in (self._inlet, self._bell.fileno(), *self._monitors):
                    poller.register(each, zmq.POLLIN)
                again = min((due_s for due_s, _ in self._again), default=None)
            wait_ms = None if again is None else max(0, int(1e3 * (again - time.monotonic())) + 1)
            ready = dict(poller.poll(wait_ms))
            if self._bell.fileno() in ready:
                self._bell.recv(4096)
            # What came before a loss first.
            with suppress(zmq.Again):
                for _ in range(_BURST):
                    self._take(self._inlet.recv_multipart(zmq.NOBLOCK, copy=False))
            for monitor in [each for each in ready if isinstance(each, zmq.Socket) and each is not self._inlet]:
                self._note(monitor)
            self._begin_again()
        # Each open socket would hold up the end for ever: also of a connection in whose place another was made.
        with self._lock:
            left = list(self._monitors.values())
        for connection in left:
            connection.end("this instance ends")
        for monitor in self._monitors:
            monitor.close(0)
        self._inlet.close(0)
        self._context.term()
        self._bell.close()
        self._ring.close()

    def _begin_again(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [connection for due_s, connection in self._again if due_s <= now]
            self._again = [one for one in self._again if one[0] > now]
            for connection in due:
                number = connection.peer.instance
                if self._connections.get(number) is connection and not self._closed:
                    del self._connections[number]
                    if (peer := self._table.get(number)) is not None:
                        self._begin(peer, connection.term + 1)

    def _note(self, monitor: zmq.Socket[bytes]) -> None:
        """Something about a connection."""
        event = recv_monitor_message(monitor)["event"]
        connection = self._monitors[monitor]
        if event == zmq.EVENT_MONITOR_STOPPED:
            with self._lock:
                del self._monitors[monitor]
            monitor.close(0)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            connection.up = True
        elif connection.up:
            connection.end(f"{named(connection.peer.instance)} has closed the connection")
        else:
            what = "it is not there" if event == zmq.EVENT_CLOSED else "the handshake failed: another secret?"
            connection.end(f"{named(connection.peer.instance)} cannot be reached: {what}")

    def _take(self, frames: list[zmq.Frame]) -> None:
        """A message of some end."""
        try:
            head, body = _decode(frames[0].buffer), frames[1].buffer
        except (msgspec.DecodeError, IndexError):
            return
        if head.target_life != self.incarnation:
            return
        with self._lock:
            before = connection = self._connections.get(head.source)
            life = head.life, head.term
            if head.kind == FrameKind.HELLO and not self._closed and self._welcome(connection, head):
                connection = self._connections[head.source]
        if before is not None and before is not connection:
            before.end(f"{named(head.source)} has made another connection")
        if connection is None or connection.life != life or connection.ended is not None:
            return
        connection.up = True
        if head.kind == FrameKind.DATA:
            connection.came(head.scope, head.lane, body)
        elif head.kind == FrameKind.PUSH and self._handler is not None:
            self._handler(head.source, head.scope, head.note, body)

    def _welcome(self, connection: PeerConnection | None, hello: FrameHead) -> bool:
        """Begin another connection where a greeting asks for that, or comes from an end that could not be reached."""
        life, term = hello.life, hello.term
        if connection is not None and connection.life >= (life, term):
            if connection.ended is None or connection.peer.incarnation != life:
                return False
            term = connection.term + 1
        peer = self._table.get(hello.source)
        if peer is None or peer.incarnation != life:  # it greets before it was named
            peer = PeerAddress(hello.source, life, hello.note.decode())
        self._begin(peer, term)
        return True


class PeerStream:
    """One request's stream to a set of peers; it raises PeerLostError once a connection closes."""

    def __init__(self, scope: str, connections: Mapping[int, PeerConnection]) -> None:
        self.scope = scope
        self._connections = connections

    def send(self, to: int, lane: int, body: Buffer) -> PeerTicket:
        """One message for `expect` on the other side. The ticket: `body` may be changed."""
        return self._connections[to].send(FrameKind.DATA, self.scope, lane, b"", body)

    def expect(self, source: int, lane: int, into: memoryview) -> PeerTicket:
        """The next message of a lane, which has the size of `into`. The ticket: it is there."""
        return self._connections[source].expect(self.scope, lane, into)

    def push(self, to: int, note: bytes, body: Buffer = b"", scope: str | None = None) -> PeerTicket:
        """See `PeerNetwork.push`. scope: None: the stream's."""
        return self._connections[to].send(FrameKind.PUSH, self.scope if scope is None else scope, 0, note, body)

    def check(self) -> None:
        """Raise PeerLostError when a connection has ended."""
        for connection in self._connections.values():
            if connection.ended is not None:
                raise PeerLostError(connection.ended, connection.peer.instance)
