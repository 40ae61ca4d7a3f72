"""Memory through which bodies pass from one end to another: a few slabs of equal size, each for one body at a time.

Shared memory has no name in any file system (`memfd`): nothing of it outlives its processes, however they end, and no
limit of a /dev/shm counts. It is found through the offering process's descriptors (`/proc`), and proved by its first
bytes. An end that cannot read it (another host, container or user) gets the bodies over its socket.

NVIDIA's NIXL (UCX: shared memory, TCP, RDMA where there is any) is another kind (`pip install 'headway[nixl]'`): a slab
is read into memory of the receiver first, and written into its slots from there, so what was forgotten is not written,
whatever the network does, and no pool need be registered. NIXL's agent polls in a thread of its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from secrets import randbits
from typing import Any, Protocol
from uuid import uuid4

import msgspec
import numpy as np
from typing_extensions import override

from headway.core.errors import ConfigError
from headway.runtime.engine.protocol import PeerLostError
from headway.runtime.kv_transfer.connector import Bytes

SLABS, SLAB_BYTES = 4, 2 << 20
"""How much may have been sent to one other end and not have been read: backpressure, and bounded memory. Host memory
that is never touched is none. What a body of 2 MiB costs beside its copies is a fifth of them."""

_NAME = "headway-kv"
_ABOUT = struct.Struct("<IIQ32s")
_HEAD = mmap.PAGESIZE
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""The size cannot change, so a reader of the mapping cannot be made to touch missing pages (SIGBUS)."""


class SlabMemory:
    """The sender's, for one connection: bodies are put together here, and travel with their notes."""

    kind = ""
    """How others read it (`MemoryKind`); empty: they do not."""

    def __init__(self, memory: Bytes | None = None, about: bytes = b"") -> None:
        self.number = randbits(63)
        self.slabs = np.empty(SLABS * SLAB_BYTES, dtype=np.uint8) if memory is None else memory
        self.slabs = self.slabs.reshape(SLABS, -1)
        self.about = about

    def found(self) -> None:
        """It need not be found any more."""

    def close(self) -> None:
        """Nothing is sent from it any more."""


class SlabReader(Protocol):
    """The receiver's view of another end's memory."""

    def read(self, slab: int, size: int, check: Callable[[], None]) -> Bytes:
        """The first bytes of a slab, until the next call. `check` is called meanwhile and may raise. Raises OSError."""

    def close(self) -> None:
        """Nothing is read any more."""


class MemoryKind(Protocol):
    """A way in which ends read each other's memory."""

    @property
    def name(self) -> str: ...

    def make(self) -> SlabMemory:
        """Memory for one connection. Raises OSError."""

    def attach(self, about: bytes) -> SlabReader | None:
        """Another end's memory; None: it cannot be read here."""


class _SharedSlabs(SlabMemory):
    kind = "shared"

    def __init__(self) -> None:
        size, nonce = _HEAD + SLABS * SLAB_BYTES, os.urandom(32)
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, size)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            mapped = mmap.mmap(self._file, size)
        except BaseException:
            self.found()
            raise
        mapped[: len(nonce)] = nonce
        about = _ABOUT.pack(os.getpid(), self._file, size, nonce)
        super().__init__(np.frombuffer(mapped, dtype=np.uint8)[_HEAD:], about)

    def found(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    close = found


class _SharedReader(SlabReader):
    """See `SlabReader`."""

    def __init__(self, slabs: Bytes) -> None:
        self._slabs = slabs.reshape(SLABS, -1)

    @override
    def read(self, slab: int, size: int, check: Callable[[], None]) -> Bytes:
        if not 0 <= slab < len(self._slabs) or size > self._slabs.shape[1]:
            raise OSError(f"{size} bytes of slab {slab} are in no shared memory")
        return self._slabs[slab, :size]

    @override
    def close(self) -> None:
        pass


class SharedMemory(MemoryKind):
    """`MemoryKind` of processes on one host that see each other's descriptors."""

    name = _SharedSlabs.kind

    @override
    def make(self) -> SlabMemory:
        return _SharedSlabs()

    @override
    def attach(self, about: bytes) -> SlabReader | None:
        with suppress(OSError, ValueError, struct.error):
            process, file, size, nonce = _ABOUT.unpack(about)
            path = f"/proc/{process}/fd/{file}"
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return None
            found = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                there = os.fstat(found)
                sealed = fcntl.fcntl(found, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
                if not stat.S_ISREG(there.st_mode) or there.st_size != size or not sealed:
                    return None
                mapped = mmap.mmap(found, size, prot=mmap.PROT_READ)
            finally:
                os.close(found)
            if mapped[: len(nonce)] == nonce:
                return _SharedReader(np.frombuffer(mapped, dtype=np.uint8)[_HEAD:])
        return None


_POLL_S = 50e-6


class _SlabAddress(msgspec.Struct, frozen=True, array_like=True):
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
        return _NixlSlabs(self, *self.register(SLABS * SLAB_BYTES))

    @override
    def attach(self, about: bytes) -> SlabReader | None:
        try:
            return _NixlReader(self, msgspec.msgpack.decode(about, type=_SlabAddress))
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
        where = _SlabAddress(nixl.describe(), int(memory.ctypes.data))
        super().__init__(memory, msgspec.msgpack.encode(where))
        self._nixl, self._registered = nixl, registered

    def close(self) -> None:
        self._nixl.release(self._registered)


class _NixlReader(SlabReader):
    """See `SlabReader`. Raises OSError."""

    def __init__(self, nixl: NixlMemory, where: _SlabAddress) -> None:
        self._nixl, self._where = nixl, where
        self._aside, self._registered = nixl.register(SLAB_BYTES)
        nixl.meet(where.agent)

    @override
    def read(self, slab: int, size: int, check: Callable[[], None]) -> Bytes:
        if not 0 <= slab < SLABS or size > self._aside.nbytes:
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
