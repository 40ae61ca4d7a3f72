"""Memory through which bodies pass from one end to another: a few slabs of equal size, each for one body at a time.

Shared memory has no name in any file system (`memfd`): nothing of it outlives its processes, however they end, and no
limit of a /dev/shm counts. It is found through the offering process's descriptors (`/proc`), and proved by its first
bytes. An end that cannot read it (another host, container or user) gets the bodies over its socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from secrets import randbits
from typing import Protocol

import numpy as np

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


class _SharedReader:
    """See `SlabReader`."""

    def __init__(self, slabs: Bytes) -> None:
        self._slabs = slabs.reshape(SLABS, -1)

    def read(self, slab: int, size: int, check: Callable[[], None]) -> Bytes:
        """See `SlabReader.read`."""
        if not 0 <= slab < len(self._slabs) or size > self._slabs.shape[1]:
            raise OSError(f"{size} bytes of slab {slab} are in no shared memory")
        return self._slabs[slab, :size]

    def close(self) -> None:
        """See `SlabReader.close`."""


class SharedMemory:
    """`MemoryKind` of processes on one host that see each other's descriptors."""

    name = _SharedSlabs.kind

    def make(self) -> SlabMemory:
        """See `MemoryKind.make`."""
        return _SharedSlabs()

    def attach(self, about: bytes) -> SlabReader | None:
        """See `MemoryKind.attach`."""
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
