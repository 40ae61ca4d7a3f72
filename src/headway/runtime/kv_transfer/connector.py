"""KV connectors: how KV moves between instances, as the scheduler's side and the worker's side use it.

The shape, and names where the meaning is the same, are those of vLLM's KV connectors (`KVConnectorBase_V1`). What is
different, and why: KV is pushed by its holder, slice by slice, and a decode begins when all of it is there (Tetris
§4.2, step 6). So nothing is loaded during a forward pass (`start_load_kv`, `wait_for_layer_load`), no metadata travels
with a batch (`build_connector_meta`: an instance of one process gets it directly, several ranks between batches), and
source and target of a slice come from the controller, not from a look-up of prompts. Instances may be cut by heads in
different ways: `ReshardingConnector` stands before any connector and re-shards.

A connector is found by name: `peers` (shared memory on one host, TCP between hosts), `nixl` (NVIDIA's NIXL, an extra)
and `auto` (NIXL where it is installed, else `peers`) are in this package; others are what distributions register under
the entry points `headway.kv_connectors`. It may be used from one thread; its own threads write into the pool.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headway.core.errors import ConfigError
from headway.kv.allocator import Indices, slot_ranges_of
from headway.runtime.engine.protocol import end_of, instance_of, rank_of, routes

if TYPE_CHECKING:
    from headway.runtime.kv_transfer.peers import PeerNetwork


Bytes = npt.NDArray[np.uint8]
"""Keys and values in memory, (layers, 2, KV heads, slots, bytes of a head's vector)."""


class SaveKv(NamedTuple):
    """A movement of KV of one request from here, by the number that the router gave it. `to`: an instance; behind
    `ReshardingConnector` one of its ends."""

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


class KvReceived(NamedTuple):
    """A slice has arrived completely.

    Times are CLOCK_MONOTONIC: first and last byte.
    """

    request: str
    piece: int
    source: int
    began_s: float
    ended_s: float


class KvLost(NamedTuple):
    """Nothing more of a request will come or go. `end`: of the peer that is gone, where it is that."""

    request: str
    why: str
    end: int | None = None


class FinishedTransfers(NamedTuple):
    """Transfers that have ended since the last call."""

    received: list[KvReceived]
    lost: list[KvLost]


class KvConnector(ABC):
    """One instance's connector, or one rank's where an instance is cut by heads: each rank then moves its own."""

    # -- the scheduler's side -----------------------------------------------------------------------------------------

    @abstractmethod
    def update_state_after_alloc(self, request: str, place: KvPlace) -> None:
        """Reserve slots for the KV of a request: received KV is written there until `forget`."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: str) -> int | None:
        """Return how many of the request's reserved tokens have all their KV; None if nothing is reserved."""

    @abstractmethod
    def forget(self, request: str) -> None:
        """Nothing of a request is to be sent any more. Nothing of it is written here any more once this has returned:
        its slots may be given away."""

    # -- the worker's side --------------------------------------------------------------------------------------------

    @abstractmethod
    def save_kv_layer(self, save: SaveKv, layer: int, part: KvPart) -> None:
        """KV of a layer is there and may be sent. Returns at once; slots stay as they are until `wait_for_save`."""

    @abstractmethod
    def finish_save(self, save: SaveKv) -> None:
        """All that the movement has from here has been given to `save_kv_layer`, maybe nothing."""

    @abstractmethod
    def wait_for_save(self, request: str) -> None:
        """Return when slots of a request may be overwritten: what has not been sent yet has been copied. Never waits
        for another instance."""

    @abstractmethod
    def get_finished(self) -> FinishedTransfers:
        """What has come to its end since the last call."""

    @abstractmethod
    def shutdown(self) -> None:
        """End its threads. The pool is not touched any more."""


Factory = Callable[["PeerNetwork", Callable[[], None]], "KvConnector"]
"""(the instance's peers, what to call from any thread when `get_finished` has something) to its connector."""

log = logging.getLogger("headway.kv_transfer")

_GROUP = "headway.kv_connectors"
_factories: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Make a connector known in this process; the newest of a name counts."""
    _factories[name] = factory


def names() -> list[str]:
    """All that `make_connector` would find."""
    return sorted({"auto", "nixl", "peers", *_factories, *(point.name for point in entry_points(group=_GROUP))})


def check_connector(name: str) -> None:
    """Raises ConfigError where `make_connector` would: for an unknown connector, and one that is not installed."""
    if name not in names():
        raise ConfigError(f"kv_connector '{name}': must be one of {', '.join(names())}")
    if name == "nixl" and name not in _factories and find_spec("nixl") is None:
        raise ConfigError("kv_connector 'nixl': NIXL is not installed: pip install 'headway[nixl]'")


def make_connector(name: str, peers: PeerNetwork, wake: Callable[[], None]) -> KvConnector:
    """The connector of that name. Raises ConfigError, see `check_connector`."""
    check_connector(name)
    if name in _factories:
        return _factories[name](peers, wake)
    if name in ("auto", "nixl", "peers"):
        from headway.runtime.kv_transfer.local import PeerConnector, SharedMemory

        if name == "peers" or (name == "auto" and find_spec("nixl") is None):
            return PeerConnector(peers, wake, (SharedMemory(),))
        from headway.runtime.kv_transfer.nixl import NixlMemory

        try:
            return PeerConnector(peers, wake, (NixlMemory(), SharedMemory()))
        except ConfigError as error:
            if name == "nixl":
                raise
            log.warning("%s; KV moves without NIXL", error)
            return PeerConnector(peers, wake, (SharedMemory(),))
    (point, *_) = entry_points(group=_GROUP, name=name)
    factory: Factory = point.load()
    return factory(peers, wake)


# Any connector, between instances that are cut by heads, each in its own number of ranks (`routes`).
#
# What is saved to an instance goes to those of its ranks that have heads of it; a piece has come from an instance when
# it has come from all of its ranks that send here. So its user knows instances only, and the connector inside ends
# only.


class ReshardingConnector(KvConnector):
    """The end of rank `rank` of `ranks`. ranks_of: how many another instance has. `get_finished` may be called from
    another thread than the rest."""

    def __init__(
        self, inner: KvConnector, kv_heads: int, ranks_of: Callable[[int], int], rank: int = 0, ranks: int = 1
    ) -> None:
        self._inner, self._kv_heads, self._ranks_of = inner, kv_heads, ranks_of
        self._rank, self._ranks = rank, ranks
        self._gate = threading.Lock()
        self._come: dict[tuple[str, int, int], dict[int, KvReceived]] = {}

    def update_state_after_alloc(self, request: str, place: KvPlace) -> None:
        self._inner.update_state_after_alloc(request, place)

    def get_num_new_matched_tokens(self, request: str) -> int | None:
        return self._inner.get_num_new_matched_tokens(request)

    def forget(self, request: str) -> None:
        self._inner.forget(request)
        with self._gate:
            for key in [key for key in self._come if key[0] == request]:
                del self._come[key]

    def save_kv_layer(self, save: SaveKv, layer: int, part: KvPart) -> None:
        for end, heads in self._to(save.to):
            start, stop = max(heads.start, part.heads.start), min(heads.stop, part.heads.stop)
            if start < stop:
                some = replace(part, heads=range(start, stop), row=part.row + start - part.heads.start)
                self._inner.save_kv_layer(save._replace(to=end), layer, some)

    def finish_save(self, save: SaveKv) -> None:
        for end, _ in self._to(save.to):
            self._inner.finish_save(save._replace(to=end))

    def wait_for_save(self, request: str) -> None:
        self._inner.wait_for_save(request)

    def get_finished(self) -> FinishedTransfers:
        received, lost = self._inner.get_finished()
        whole = []
        for one in received:
            instance = instance_of(one.source)
            key = (one.request, one.piece, instance)
            with self._gate:
                if self._inner.get_num_new_matched_tokens(one.request) is None:  # forgotten since it came
                    continue
                # By rank: a slice is complete once every source rank that sends here has reported its part.
                come = self._come.setdefault(key, {})
                come[rank_of(one.source)] = one
                if come.keys() < self._from(instance):
                    continue
                del self._come[key]
            began_s = min(each.began_s for each in come.values())
            whole.append(one._replace(source=instance, began_s=began_s))
        return FinishedTransfers(whole, lost)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _to(self, instance: int) -> list[tuple[int, range]]:
        """The ends of an instance to which something goes from here, with its heads."""
        found = routes(self._kv_heads, self._ranks, self._ranks_of(instance))
        return [(end_of(instance, target), heads) for (rank, target), heads in found.items() if rank == self._rank]

    def _from(self, instance: int) -> set[int]:
        """The ranks of an instance that send something here."""
        found = routes(self._kv_heads, self._ranks_of(instance), self._ranks)
        return {rank for rank, target in found if target == self._rank}


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
