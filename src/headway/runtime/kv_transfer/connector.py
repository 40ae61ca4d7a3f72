"""KV connectors by name, and what they move: parts of a pool, the places that they go to, bodies and their notes.

`peers` (shared memory on one host, TCP between hosts), `nixl` (NVIDIA's NIXL, an extra), and `auto`: NIXL where it is
installed, else `peers`. All are `local.PeerConnector`, with different memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headway.core.errors import ConfigError
from headway.kv.allocator import Indices, slot_ranges_of

if TYPE_CHECKING:
    from headway.runtime.kv_transfer.local import PeerConnector
    from headway.runtime.kv_transfer.peers import PeerNetwork


Bytes = npt.NDArray[np.uint8]
"""Keys and values in memory, (layers, 2, KV heads, slots, bytes of a head's vector)."""


class SaveKv(NamedTuple):
    """A movement of KV of one request from here, by the number that the controller gave it. `to`: an instance; inside
    `PeerConnector` one of its ends."""

    request: str
    piece: int
    to: int


@dataclass(frozen=True)
class KvPart:
    """KV that lies here: of tokens `positions` (numbers in the prompt) and KV heads `heads` (of the whole model), in as
    many `slots` of `cache`, the first head at `row` of its heads."""

    cache: Bytes
    heads: range
    row: int
    positions: Indices
    slots: Indices


@dataclass(frozen=True)
class KvPlace:
    """Room for KV of a request's first `tokens` tokens, in their order: `runs` of slots of `cache`, (first, count).
    `heads`: the KV heads of the whole model that the cache has."""

    cache: Bytes
    heads: range
    tokens: int
    runs: tuple[tuple[int, int], ...]


log = logging.getLogger("headway.kv_transfer")

NAMES = ("auto", "nixl", "peers")


def check_connector(name: str) -> None:
    """Raises ConfigError where `make_connector` would: for an unknown connector, and one that is not installed."""
    if name not in NAMES:
        raise ConfigError(f"kv_connector '{name}': must be one of {', '.join(NAMES)}")
    if name == "nixl" and find_spec("nixl") is None:
        raise ConfigError("kv_connector 'nixl': NIXL is not installed: pip install 'headway[nixl]'")


def make_connector(
    name: str, peers: PeerNetwork, wake: Callable[[], None], kv_heads: int, ranks: int = 1
) -> PeerConnector:
    """The connector of that name; see `PeerConnector`. Raises ConfigError, see `check_connector`."""
    from headway.runtime.kv_transfer.local import PeerConnector
    from headway.runtime.kv_transfer.slab_memory import MemoryKind, NixlMemory, SharedMemory

    check_connector(name)
    kinds: list[MemoryKind] = [SharedMemory()]
    if name == "nixl" or (name == "auto" and find_spec("nixl") is not None):
        try:
            kinds.insert(0, NixlMemory())
        except ConfigError as error:
            if name == "nixl":
                raise
            log.warning("%s; KV moves without NIXL", error)
    return PeerConnector(peers, wake, kinds, kv_heads, ranks)


_FEW = 16
"""Slots a run below which one indexed copy beats a copy for each run."""

_WIDE = 8


def by_runs(slots: int, runs: int) -> bool:
    """Whether to copy contiguous ranges one by one (few ranges) rather than gather by index."""
    return slots >= _FEW * runs


def gather(heads: Bytes, slots: Indices, into: Bytes) -> None:
    """Slots of (2, heads, slots, vector), in any order, into a body."""
    source, body = _wide(heads), _wide(into.reshape(*heads.shape[:2], len(slots), heads.shape[-1]))
    runs = slot_ranges_of(slots)
    if by_runs(len(slots), len(runs)):
        at = 0
        for first, count in runs:
            body[:, :, at : at + count] = source[:, :, first : first + count]
            at += count
        return
    # mode="clip" lets numpy write straight into `out`: the default mode buffers it. All slots are in range.
    for plane, head in np.ndindex(*heads.shape[:2]):
        np.take(source[plane, head], slots, axis=0, out=body[plane, head], mode="clip")


def spread(body: Bytes, heads: Bytes, runs: Sequence[tuple[int, int]]) -> None:
    """A body into runs of slots, (first, count) in the order of its tokens."""
    source, target = _wide(body.reshape(*heads.shape[:2], -1, heads.shape[-1])), _wide(heads)
    at = 0
    for first, count in runs:
        target[:, :, first : first + count] = source[:, :, at : at + count]
        at += count


def scatter(body: Bytes, heads: Bytes, slots: Indices) -> None:
    """A body into slots in any order."""
    source, target = _wide(body.reshape(*heads.shape[:2], len(slots), heads.shape[-1])), _wide(heads)
    for plane, head in np.ndindex(*heads.shape[:2]):
        target[plane, head][slots] = source[plane, head]


def _wide(vectors: Bytes) -> npt.NDArray[Any]:
    """The same in words, which are copied faster than bytes."""
    return vectors.view(np.uint64) if vectors.shape[-1] % _WIDE == 0 else vectors


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
