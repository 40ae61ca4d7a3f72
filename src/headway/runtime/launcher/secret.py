"""ZeroMQ CURVE keys, derived from a random token that processes of different hosts get through Ray. No torch.

Connections are encrypted, and closed to peers without the token: the serving socket's permanent key pair is made from
it, and without that public key, which is never sent, a client cannot even begin CURVE's handshake (RFC 26/CurveZMQ).
Every connection has keys of its own beside that.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import zmq
from zmq.utils import z85

from headway.core.errors import ConfigError

_PURPOSE = b"headway channel 1\x00"


def new_token() -> str:
    """192 random bits, as text."""
    return secrets.token_urlsafe(24)


def guard_server(socket: zmq.Socket[Any], token: str) -> None:
    """Admit only peers with the token. Called before `bind`."""
    secret = _server_secret(token)
    socket.curve_secretkey = secret
    socket.curve_publickey = zmq.curve_public(secret)
    socket.curve_server = True


def guard_client(socket: zmq.Socket[Any], token: str) -> None:
    """Prove this end's token, and refuse servers without it. Called before `connect`."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = zmq.curve_public(_server_secret(token))


def _server_secret(token: str) -> bytes:
    if not zmq.has("curve"):
        raise ConfigError("several hosts need a ZeroMQ with CURVE, which this one was built without")
    return bytes(z85.encode(hashlib.sha256(_PURPOSE + token.encode()).digest()))
