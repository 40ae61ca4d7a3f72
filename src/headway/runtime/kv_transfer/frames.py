"""The wire format between two instances: a handshake, then frames of a head, a scope, a note and a body."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from enum import IntEnum
from typing import NamedTuple

from headway.runtime.kv_transfer.peer import PeerLostError
from headway.runtime.kv_transfer.rank_routes import named

HEAD = struct.Struct("<BBHIQq")
_HELLO = struct.Struct("<4sII16s")
_MAGIC = b"HWP2"
_MAC = 32


INLINE = -1
"""In the place of `FrameHead.at`: the body follows."""


class FrameKind(IntEnum):
    DATA = 0
    PUSH = 1
    READ = 2
    """`at` messages with a body in the receiver's shared buffer have been read. No body."""


class FrameHead(NamedTuple):
    """What stands before a body of `length` bytes. `scope`: the request; `lane`: one of its streams; `note`: what a
    pushed message says of its body; `at`: where in the sender's arena that is."""

    kind: int
    lane: int
    scope: str
    note: bytes
    length: int
    at: int


def head(kind: FrameKind, lane: int, scope: str, note: bytes, length: int, at: int = INLINE) -> bytes:
    name = scope.encode()
    return HEAD.pack(kind, lane, len(name), len(note), length, at) + name + note


def greet(peer: socket.socket, number: int, incarnation: int, secret: bytes) -> tuple[int, int]:
    """Both ends, on a fresh connection with a time limit: (number, incarnation) of the other. Each shows that it knows
    the secret by what it makes of the other's 16 random bytes (HMAC-SHA256). Raises OSError or PeerLostError."""
    own = _HELLO.pack(_MAGIC, number, incarnation, os.urandom(16))
    peer.sendall(own)
    theirs = exactly(peer, _HELLO.size)
    magic, other, life, _ = _HELLO.unpack(theirs)
    if magic != _MAGIC or other == number:  # the latter: an echo
        raise PeerLostError("whoever is there is no other instance of this cluster")
    peer.sendall(_proof(secret, own, theirs))
    if not hmac.compare_digest(exactly(peer, _MAC), _proof(secret, theirs, own)):
        raise PeerLostError(f"{named(other)} does not know this cluster's secret")
    return other, life


def _proof(secret: bytes, own: bytes, theirs: bytes) -> bytes:
    return hmac.digest(secret, own + theirs, hashlib.sha256)


def exactly(peer: socket.socket, size: int) -> bytes:
    """So many bytes. Raises OSError or PeerLostError."""
    got = b""
    while len(got) < size:
        more = peer.recv(size - len(got))
        if not more:
            raise PeerLostError("the connection ended during the handshake")
        got += more
    return got
