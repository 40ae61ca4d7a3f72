"""How processes of an engine find and trust each other: addresses of hosts, and CURVE keys.

No torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import secrets
import socket
import struct
from typing import Any

import zmq
from zmq.utils import z85

from headway.core.errors import ConfigError

_ANY_PORT = 9
_SIOCGIFADDR = 0x8915


def address_towards(address: str) -> str:
    """This host's own address on the way to `address`, by its routes; nothing is sent. Raises ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError as error:
            raise ConfigError(f"this host has no route to {address} ({error.strerror})") from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None when no interface does."""
    if address.startswith("127."):
        address = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


# ZeroMQ CURVE keys, derived from a random token that processes of different hosts get through Ray. No torch.
#
# Connections are encrypted, and closed to peers without the token: the serving socket's permanent key pair is made from
# it, and without that public key, which is never sent, a client cannot even begin CURVE's handshake (RFC 26/CurveZMQ).
# Every connection has keys of its own beside that.

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
