"""Memory of one process that another on the same host reads: offered, mapped and verified over a fresh connection.

An arena has no name in any file system: nothing of it outlives its processes, however they end, and no limit of a
/dev/shm counts. It is found through the offering process's descriptors (`/proc`), and proved by random bytes that it
begins with. Where that fails (another host, container or user), bodies go through the socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import stat
import struct
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from headway.runtime.kv_transfer.frames import exactly
from headway.runtime.kv_transfer.ring_buffer import most

Memory = npt.NDArray[np.uint8]

ARENA_BYTES = 8 << 20
"""How much may have been sent to one other end and not have been read. Host memory that is never touched is none."""

_NAME = "headway-kv"
_OFFER = struct.Struct("<IIQ32s")
_CREDENTIALS = struct.Struct("3i")
_HEAD = mmap.PAGESIZE
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""The size cannot change, so a reader of the mapping cannot be made to touch missing pages (SIGBUS)."""


class SharedBuffer:
    """Of `size` bytes, for another to read. Raises OSError."""

    def __init__(self, size: int) -> None:
        nonce = os.urandom(32)
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, _HEAD + size)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            mapped = mmap.mmap(self._file, _HEAD + size)
        except BaseException:
            self.found()
            raise
        mapped[: len(nonce)] = nonce
        self.memory: Memory = np.frombuffer(mapped, dtype=np.uint8)[_HEAD:]
        self.offer = _OFFER.pack(os.getpid(), self._file, size, nonce)

    def found(self) -> None:
        """It need not be found any more. Harmless when repeated."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def find(offer: bytes) -> Memory | None:
    """What another process offers, to be read; None where it is not to be had."""
    process, file, size, nonce = _OFFER.unpack(offer)
    path = f"/proc/{process}/fd/{file}"
    with suppress(OSError, ValueError):
        if not size or not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        found = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            about = os.fstat(found)
            sealed = fcntl.fcntl(found, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not stat.S_ISREG(about.st_mode) or about.st_size != _HEAD + size or not sealed:
                return None
            mapped = mmap.mmap(found, _HEAD + size, prot=mmap.PROT_READ)
        finally:
            os.close(found)
        if mapped[: len(nonce)] == nonce:
            return np.frombuffer(mapped, dtype=np.uint8)[_HEAD:]
    return None


def exchange(peer: socket.socket, size: int) -> tuple[SharedBuffer | None, Memory | None]:
    """Both ends, after `greet`: an arena of `size` bytes that the other has found, and the other's. 0: none is wanted.
    Raises OSError or PeerLostError."""
    own = None
    if most(size) and at_home(peer):
        with suppress(OSError):
            own = SharedBuffer(size)
    try:
        peer.sendall(own.offer if own is not None else bytes(_OFFER.size))
        offer = exactly(peer, _OFFER.size)
        theirs = find(offer) if size and at_home(peer) and _is(peer, offer) else None
        peer.sendall(b"\1" if theirs is not None else b"\0")
        return own if exactly(peer, 1) == b"\1" else None, theirs
    finally:
        if own is not None:
            own.found()


def _is(peer: socket.socket, offer: bytes) -> bool:
    """Whether an offer is of the process at the other end, as far as the system says which that is: what is between two
    ends is not gone round."""
    if peer.family != socket.AF_UNIX:
        return True
    process, _, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(process == _OFFER.unpack(offer)[0])


def at_home(peer: socket.socket) -> bool:
    """Whether a connection stays on this host: a Unix socket, or one from an address to itself."""
    if peer.family == socket.AF_UNIX:
        return True
    near, far = peer.getsockname(), peer.getpeername()
    return bool(near[0] == far[0])
