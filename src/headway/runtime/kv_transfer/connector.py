"""KV connectors: how KV moves between instances, as the scheduler's side and the worker's side use it.

The shape, and names where the meaning is the same, are those of vLLM's KV connectors (`KVConnectorBase_V1`). What is
different, and why: KV is pushed by its holder, slice by slice, and a decode begins when all of it is there (Tetris
§4.2, step 6). So nothing is loaded during a forward pass (`start_load_kv`, `wait_for_layer_load`), no metadata travels
with a batch (`build_connector_meta`: an instance of one process gets it directly, several ranks between batches), and
source and target of a slice come from the controller, not from a look-up of prompts. Instances may be cut by heads in
different ways: `resharding_connector` stands before any connector and re-shards.

A connector is found by name: `peers` (shared memory on one host, TCP between hosts), `nixl` (NVIDIA's NIXL, an extra)
and `auto` (NIXL where it is installed, else `peers`) are in this package; others are what distributions register under
the entry points `headway.kv_connectors`. It may be used from one thread; its own threads write into the pool.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.core.errors import ConfigError
from headway.kv.slot_ranges import Indices

if TYPE_CHECKING:
    from headway.runtime.kv_transfer.peers import PeerNetwork

Bytes = npt.NDArray[np.uint8]
"""Keys and values in memory, (layers, 2, KV heads, slots, bytes of a head's vector)."""


class SaveKv(NamedTuple):
    """A movement of KV of one request from here, by the number that the router gave it. `to`: an instance; behind
    `resharding_connector` one of its ends."""

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
        from headway.runtime.kv_transfer.peer_connector import PeerConnector
        from headway.runtime.kv_transfer.slab_memory import SharedMemory

        if name == "peers" or (name == "auto" and find_spec("nixl") is None):
            return PeerConnector(peers, wake, (SharedMemory(),))
        from headway.runtime.kv_transfer.nixl_memory import NixlMemory

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
