"""Buffered reading of a socket: a frame's head and a small body come in one call; and lists of buffers filled step by
step."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

from headway.runtime.kv_transfer.frames import HEAD, FrameHead

PIECES = 512
"""Buffers in one call."""

AHEAD = 1 << 16


class BufferedReader:
    """The reader of one connection, for the thread that reads it."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._poll = select.poll()
        self._poll.register(peer, select.POLLIN)
        self._buffer = memoryview(bytearray(AHEAD))
        self._low = self._high = 0

    def frame(self) -> FrameHead | None:
        """The next frame's head, however long that takes; None at the end of the connection."""
        if not self._have(HEAD.size):
            return None
        kind, lane, name, note, length, place = HEAD.unpack_from(self._buffer, self._low)
        if HEAD.size + name + note > AHEAD:
            raise OSError(f"a frame's note has {note} bytes, and may have {AHEAD - HEAD.size - name}")
        if not self._have(HEAD.size + name + note):
            return None
        at = self._low + HEAD.size
        scope, said = bytes(self._buffer[at : at + name]).decode(), bytes(self._buffer[at + name : at + name + note])
        self._low = at + name + note
        return FrameHead(kind, lane, scope, said, length, place)

    def into(self, views: list[memoryview], most: int) -> int:
        """Read up to `most` bytes without waiting: how many, 0 at the end of the connection, -1: none are there."""
        here = min(self._high - self._low, most)
        if here:
            here = min(here, views[0].nbytes)
            views[0][:here] = self._buffer[self._low : self._low + here]
            self._low += here
            return here
        try:
            return self._peer.recvmsg_into(views[:PIECES], 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return -1

    def sleep(self) -> None:
        """Until something is there, or the socket is shut."""
        self._poll.poll()

    def _have(self, size: int) -> bool:
        """Bring so many bytes into the buffer."""
        if self._low + size > AHEAD:
            rest = bytes(self._buffer[self._low : self._high])
            self._low, self._high = 0, len(rest)
            self._buffer[: len(rest)] = rest
        while self._high - self._low < size:
            if self._low == self._high:
                self._low = self._high = 0
            got = self._peer.recv_into(self._buffer[self._high :])
            if not got:
                return False
            self._high += got
        return True


def advance(views: list[memoryview], sent: int) -> None:
    """Drop `sent` bytes from the front."""
    at = 0
    while at < len(views) and sent >= views[at].nbytes:
        sent -= views[at].nbytes
        at += 1
    del views[:at]
    if sent:
        views[0] = views[0][sent:]


def rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of a place of which `done` bytes were filled."""
    left = list(views)
    advance(left, done)
    return left
