"""Addresses of instances, and the error for one that cannot be reached."""

from __future__ import annotations

import socket

import msgspec

from headway.core.errors import ConfigError, HeadwayError
from headway.runtime.kv_transfer.rank_routes import end_of


class PeerAddress(msgspec.Struct, frozen=True):
    """How one instance reaches another. `incarnation` grows with each process that takes the number. `address`:
    `unix:PATH` or `tcp:HOST:PORT`; of an instance that is several processes that of rank 0, and `others` of the other
    tensor-parallel ranks, in order."""

    instance: int
    incarnation: int
    address: str
    others: tuple[str, ...] = ()

    def ends(self) -> list[PeerAddress]:
        """Each of its ranks as a peer of its own."""
        return [
            PeerAddress(end_of(self.instance, rank), self.incarnation, address)
            for rank, address in enumerate((self.address, *self.others))
        ]


class PeerLostError(HeadwayError):
    """What was sent or expected will not come: the other instance is gone, or what was between them was cut. `end`: the
    other one, where it is that."""

    def __init__(self, why: str, end: int | None = None) -> None:
        super().__init__(why)
        self.end = end


def listen(address: str) -> tuple[socket.socket, str]:
    """A socket that listens at an address (port 0: any that is free), and where others find it."""
    family, where = parsed(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ConfigError(f"peer address {address!r}: {error}") from None
    if family == socket.AF_INET:
        host, port = listener.getsockname()[:2]
        return listener, f"tcp:{host}:{port}"
    return listener, address


def reach(address: str, timeout_s: float) -> socket.socket:
    """A socket that is connected to an address. Raises OSError."""
    family, where = parsed(address)
    peer = socket.socket(family, socket.SOCK_STREAM)
    try:
        peer.settimeout(timeout_s)
        peer.connect(where)
    except BaseException:
        peer.close()
        raise
    return peer


def prepare(peer: socket.socket) -> None:
    """Before frames: small ones leave at once, large ones meet room, and a host that vanished is noticed in 10 s."""
    peer.settimeout(None)
    for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        peer.setsockopt(socket.SOL_SOCKET, name, 4 << 20)
    if peer.family == socket.AF_INET:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4)):
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


def parsed(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """The family and what its `connect` takes. Raises ConfigError."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return socket.AF_UNIX, rest
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdecimal():
        return socket.AF_INET, (host, int(port))
    raise ConfigError(f"peer address {address!r}: must be unix:PATH or tcp:HOST:PORT")
