"""Memory that ends read by NVIDIA's NIXL (UCX: shared memory, TCP, RDMA where there is any): the connector `nixl`.

As shared memory in `local`, but a slab is read into memory of the receiver first, and written into its slots from
there: what was forgotten is not written, whatever the network does, and no pool need be registered.

Needs `pip install 'headway[nixl]'`. NIXL's agent polls in a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from typing_extensions import override

from headway.core.errors import ConfigError
from headway.runtime.engine.protocol import PeerLostError
from headway.runtime.kv_transfer import local
from headway.runtime.kv_transfer.connector import Bytes
from headway.runtime.kv_transfer.local import MemoryKind, SlabMemory, SlabReader

_POLL_S = 50e-6


class _Where(msgspec.Struct, frozen=True, array_like=True):
    """Slabs at `address` of the agent that `agent` describes."""

    agent: bytes
    address: int


class NixlMemory(MemoryKind):
    """`MemoryKind` of one end. Raises ConfigError where NIXL or its UCX is not to be had."""

    name = "nixl"

    def __init__(self) -> None:
        try:
            api = import_module("nixl._api")
            self._agent: Any = api.nixl_agent(f"headway {uuid4().hex}", api.nixl_agent_config(backends=["UCX"]))
        except Exception as error:  # it has its own for each
            raise ConfigError(f"kv_connector 'nixl': {type(error).__name__}: {error}") from None
        self._gate = threading.Lock()
        self._others: dict[bytes, Any] = {}

    @override
    def make(self) -> SlabMemory:
        return _NixlSlabs(self, *self.register(local.SLABS * local.SLAB_BYTES))

    @override
    def attach(self, about: bytes) -> SlabReader | None:
        try:
            return _NixlReader(self, msgspec.msgpack.decode(about, type=_Where))
        except (msgspec.DecodeError, OSError):
            return None

    def register(self, size: int) -> tuple[Bytes, Any]:
        """Memory that NIXL reads from and into, and what it is called there. Raises OSError."""
        made = np.zeros(size, dtype=np.uint8)
        with self._gate, _as_os_error():
            return made, self._agent.register_memory([(made.ctypes.data, size, 0, "")], "DRAM")

    def release(self, registered: Any) -> None:
        """Memory is read no more."""
        with self._gate, suppress(Exception):
            self._agent.deregister_memory(registered)

    def describe(self) -> bytes:
        """What others have to know of this agent to read its memory. Raises OSError."""
        with self._gate, _as_os_error():
            return bytes(self._agent.get_agent_metadata())

    def meet(self, agent: bytes) -> None:
        """Learn another agent's memory. Raises OSError."""
        with self._gate, _as_os_error():
            self._others[agent] = self._agent.add_remote_agent(agent)

    def leave(self, agent: bytes) -> None:
        """Its memory is read no more."""
        with self._gate, suppress(Exception):
            self._agent.remove_remote_agent(self._others.pop(agent))

    def read(self, agent: bytes, address: int, into: Bytes, check: Callable[[], None]) -> None:
        """Another agent's memory, into memory of this one. Raises OSError, and what `check` does."""
        with _as_os_error():
            with self._gate:
                here = self._agent.get_xfer_descs([(into.ctypes.data, into.nbytes, 0)], "DRAM")
                there = self._agent.get_xfer_descs([(address, into.nbytes, 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", here, there, self._others[agent])
                state = self._agent.transfer(handle)
            try:
                while state == "PROC":
                    check()
                    time.sleep(_POLL_S)
                    with self._gate:
                        state = self._agent.check_xfer_state(handle)
            finally:
                with self._gate:
                    self._agent.release_xfer_handle(handle)
            if state != "DONE":
                raise OSError(f"NIXL: {state}")


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except (PeerLostError, OSError):
        raise
    except Exception as error:  # NIXL has its own for each
        raise OSError(f"{type(error).__name__}: {error}") from None


class _NixlSlabs(SlabMemory):
    kind = NixlMemory.name

    def __init__(self, nixl: NixlMemory, memory: Bytes, registered: Any) -> None:
        where = _Where(nixl.describe(), int(memory.ctypes.data))
        super().__init__(memory, msgspec.msgpack.encode(where))
        self._nixl, self._registered = nixl, registered

    def close(self) -> None:
        self._nixl.release(self._registered)


class _NixlReader(SlabReader):
    """See `SlabReader`. Raises OSError."""

    def __init__(self, nixl: NixlMemory, where: _Where) -> None:
        self._nixl, self._where = nixl, where
        self._aside, self._registered = nixl.register(local.SLAB_BYTES)
        nixl.meet(where.agent)

    @override
    def read(self, slab: int, size: int, check: Callable[[], None]) -> Bytes:
        if not 0 <= slab < local.SLABS or size > self._aside.nbytes:
            raise OSError(f"{size} bytes of slab {slab} are not offered")
        check()
        aside = self._aside[:size]
        try:
            self._nixl.read(self._where.agent, self._where.address + slab * self._aside.nbytes, aside, check)
        except (OSError, PeerLostError):
            # The abandoned read may still write there: this memory is not used again, nor let go.
            _spoilt.append(self._aside)
            self._aside, self._registered = self._nixl.register(self._aside.nbytes)
            raise
        return aside

    @override
    def close(self) -> None:
        self._nixl.leave(self._where.agent)
        self._nixl.release(self._registered)


_spoilt: list[Bytes] = []
"""Memory of reads that were given up."""
