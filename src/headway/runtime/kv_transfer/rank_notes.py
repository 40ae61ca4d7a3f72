"""Messages about KV transfers between an engine and its ranks, carried by `runtime.executor.messages`.

A request has a name, by which other instances know it, and a number, by which the plan stream does: its blocks are
those of the number. Nothing here grows with a context.
"""

from __future__ import annotations

import msgspec

from headway.runtime.kv_transfer.peer import PeerAddress

NOBODY = 0
"""No request's number."""


class RankMeet(msgspec.Struct, frozen=True, array_like=True, tag="met"):
    """All instances that are there now (`PeerNetwork.meet`)."""

    peers: tuple[PeerAddress, ...]


class RankReserve(msgspec.Struct, frozen=True, array_like=True, tag="room"):
    """A request's first `tokens` tokens will come, into the blocks of its number. Answered by `RankReserved`.
    `life`: another
    one each time, so that no word of an earlier room is taken for one of this."""

    name: str
    number: int
    tokens: int
    life: int


class RankSend(msgspec.Struct, frozen=True, array_like=True, tag="bring"):
    """Send tokens [start, end) of a request to instance `to`, as they are or will be computed: under its number
    (`NOBODY`: none), or by runs."""

    name: str
    number: int
    piece: int
    to: int
    start: int
    end: int


class RankHolds(msgspec.Struct, frozen=True, array_like=True, tag="there"):
    """So many tokens of a request are there under its number; the rank may know of more."""

    number: int
    tokens: int


class RankDrop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Nothing of a request is to come or go any more; `for_good`: nor later, so that what is on its way is refused."""

    name: str
    for_good: bool


class RankReserved(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """What comes of a request is kept from now on."""

    name: str
    life: int


class RankReceived(msgspec.Struct, frozen=True, array_like=True, tag="came"):
    """This rank's heads of a piece are there (`connector.KvReceived`). whole: so are those of all other pieces."""

    name: str
    piece: int
    source: int
    began_s: float
    ended_s: float
    whole: bool
    life: int


class RankLost(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Something of a request will not come or go (`connector.KvLost`)."""

    name: str
    why: str
    end: int | None


ToRank = RankMeet | RankReserve | RankSend | RankHolds | RankDrop
FromRank = RankReserved | RankReceived | RankLost

encode = msgspec.msgpack.Encoder().encode
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
