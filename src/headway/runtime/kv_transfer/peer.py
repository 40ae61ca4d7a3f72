"""Addresses of instances, and the error for one that cannot be reached."""

from __future__ import annotations

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


def endpoint(address: str) -> str:
    """What ZeroMQ calls an address. Raises ConfigError."""
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if kind == "unix" and rest:
        return f"ipc://{rest}"
    if kind == "tcp" and host and port.isdecimal():
        return f"tcp://{host}:{port}"
    raise ConfigError(f"peer address {address!r}: must be unix:PATH or tcp:HOST:PORT")
