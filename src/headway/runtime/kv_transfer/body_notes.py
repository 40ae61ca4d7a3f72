"""What connectors tell each other beside KV."""

from __future__ import annotations

import msgspec
import numpy as np

from headway.kv.slot_ranges import Indices


class KvBody(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Keys and values of one layer: (2, heads, tokens, vector), `size` bytes; `tokens`: their numbers, int32. They lie
    in a slab of the sender's memory (`SlabMemory.number`), which is given back by `SlabFree`, or follow."""

    piece: int
    layer: int
    heads: tuple[int, int]
    tokens: bytes
    size: int = 0
    memory: int = 0
    slab: int = 0

    @property
    def positions(self) -> Indices:
        """The tokens."""
        return np.frombuffer(self.tokens, dtype=np.int32).astype(np.int64)


class SliceEnd(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """All of a piece has been sent, in so many bodies. Comes back with `kept` when all of it is in its slots."""

    piece: int
    bodies: int
    kept: bool = False


class MemoryOffer(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Memory of the sender; `about`: how one of its `kind` is found. Answered by `SlabFree` without a slab."""

    memory: int
    kind: str
    about: bytes


class SlabFree(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A slab has been read, or, without one, all of offered memory is to be written."""

    memory: int
    slab: int | None = None
    taken: bool = True
    """False: the receiver cannot read the memory."""


Note = KvBody | SliceEnd | MemoryOffer | SlabFree

decode = msgspec.msgpack.Decoder(Note).decode
encode = msgspec.msgpack.Encoder().encode
